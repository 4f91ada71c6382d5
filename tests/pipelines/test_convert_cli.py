import json

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from videospark.app.cli import app
from videospark.tiny.components import build_transformer


def test_there_and_back(tmp_path):
    torch.manual_seed(0)
    model = build_transformer()
    model.save_pretrained(tmp_path / "model")
    runner = CliRunner()
    back = runner.invoke(
        app, ["convert", str(tmp_path / "model"), "--to", str(tmp_path / "wan.safetensors"), "--reverse"]
    )
    assert back.exit_code == 0 and back.stdout.strip().endswith("wan.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"num_heads": 3}))
    forth = runner.invoke(
        app, ["convert", str(tmp_path / "wan.safetensors"), "--to", str(tmp_path / "again"), "--json"]
    )
    assert forth.exit_code == 0, forth.output
    report = json.loads(forth.stdout)
    assert report["format"] == "wan" and report["recipe"] is None
    again = type(model).from_pretrained(tmp_path / "again" / "transformer")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_wrong_input_is_one_line(tmp_path):
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "x.safetensors"), "--to", str(tmp_path / "out")])
    assert result.exit_code == 2 and "tensors that say its shape are missing" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shard", ["inf", "nan", "0", "1e-12"])
def test_a_shard_of_no_use_is_refused(tmp_path, shard):
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    call = ["convert", str(tmp_path / "x.safetensors"), "--to", str(tmp_path / "out"), "--shard", shard]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 2 and "shard: got" in result.output and "at least a MiB" in result.output
