"""The arms of the experiments: what each trains, and what is measured of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .checkpoints import step_of
from .experiment_measures import NUM_INTERVALS, Judge, student_at
from .experiments import KEEP_RATIOS, SIGMAS, Workspace, attention_of, warmup_config

Measure = Callable[[int], dict[str, Any]]
"""From a seed to the result of an arm."""

FRONTIER: dict[str, tuple[str, dict[str, Any]]] = {
    "pcm": ("pcm", {}),
    "dmd": ("dmd", {"dmd": {"form": "dmd"}}),
    "tdm": ("dmd", {"dmd": {"form": "tdm"}}),
    **{f"crossdistill-{c}": ("crossdistill", {"crossdistill": {"crossover": c}}) for c in range(1, len(SIGMAS))},
    "reversed-1": ("crossdistill", {"crossdistill": {"crossover": 1, "order": "reversed"}}),
    "decoupled-teacher-1": ("crossdistill", {"crossdistill": {"crossover": 1, "coupling": "teacher"}}),
    "decoupled-data-1": ("crossdistill", {"crossdistill": {"crossover": 1, "coupling": "data"}}),
}
"""Method and its table. A crossover of 0 is "tdm", one of all steps is "pcm"."""

BRANCHES: dict[str, tuple[str, str]] = {
    "sparse": ("none", "prefix"),
    "sla": ("sla", "prefix"),
    "rola-released": ("rola", "prefix"),
    "rola-balanced": ("rola", "balanced"),
}
BRANCH_KEEP_RATIOS = (0.1, 0.05)
FRONTIER_KEEP_RATIO = 0.25
"""The sparsest at which the tiny model still draws forms: methods cannot be told apart by what none of them shows."""


def arms_of(name: str, work: Workspace, judge: Judge) -> dict[str, Measure]:
    """The arms of an experiment, in the order in which they run."""
    if name == "trap":
        return {f"keep-{keep:g}": _bound(_trap, work, judge, keep) for keep in trap_keep_ratios(judge)}
    if name == "branch":
        return {
            f"{branch}-keep-{keep:g}": _bound(_branch, work, judge, (branch, keep))
            for keep in BRANCH_KEEP_RATIOS
            for branch in BRANCHES
        }
    return {arm: _bound(_frontier, work, judge, arm) for arm in FRONTIER}


def _bound(function: Callable[..., dict[str, Any]], work: Workspace, judge: Judge, what: Any) -> Measure:
    return lambda seed: function(work, judge, what, seed)


def trap_keep_ratios(judge: Judge) -> tuple[float, ...]:
    """Those of `KEEP_RATIOS` that keep different numbers of blocks, and the one that keeps a single block."""
    _, frames, height, width = judge.shape
    patch = judge.pipe.transformer.config.patch_size
    tokens = frames // patch[0] * (height // patch[1]) * (width // patch[2])
    blocks = -(-tokens // 16)
    kept: dict[int, float] = {}
    for ratio in (*KEEP_RATIOS, 1 / blocks):
        kept.setdefault(max(1, int(ratio * blocks + 1e-9)), ratio)
    return tuple(kept.values())


def _few_step(work: Workspace, stage: str, seed: int, start: str, attention: dict[str, Any], arm: str) -> Any:
    """Settings of a few-step training from the student in the folder `start`."""
    method, tables = FRONTIER[arm]
    tables = {name: dict(table) for name, table in tables.items()}
    if method in ("pcm", "crossdistill"):
        tables["pcm"] = {"solver_steps": 20}
    if method in ("dmd", "crossdistill"):
        tables["dmd"] = tables.get("dmd", {}) | {"critic_updates": work.scale.critic_updates}
    return work.config(stage, seed, method, attention=attention, model={"student": start}, **tables)


def _trap(work: Workspace, judge: Judge, keep: float, seed: int) -> dict[str, Any]:
    scale, stage, attention = work.scale, f"trap-warmup-keep-{keep:g}", attention_of(keep)
    every = max(1, scale.trap_steps // scale.trap_points)
    config = work.config(
        stage,
        seed,
        "sparse_warmup",
        attention=attention,
        sparse_warmup={"start_keep_ratio": keep, "ramp_share": 0.0},  # one sparsity all along
        training={
            "num_steps": scale.trap_steps,
            "checkpoint_every": every,
            "keep_checkpoints": -(-scale.trap_steps // every),
        },
    )
    student = work.train(config, keep_checkpoints=True)
    points = []
    for checkpoint in work.checkpoints(config):
        work.say(f"measuring: {stage}, seed {seed}, iteration {step_of(checkpoint)}")
        field = student_at(config, checkpoint, judge.device)
        points.append({"step": step_of(checkpoint), **judge.trap_point(field)})
    field = judge.field_of(student)
    after = _few_step(work, f"trap-distill-keep-{keep:g}", seed, str(student), attention, "crossdistill-1")
    few = judge.field_of(work.train(after))
    # Without them nothing can be measured, so they stay until the result is written.
    work.drop_later(config)
    return {
        "keep_ratio": keep,
        "points": points,
        "warmup": judge.origins(judge.many_step_end, field, NUM_INTERVALS),
        "few_steps": judge.origins(judge.few_step_end, field, len(SIGMAS)),
        "crossdistill": judge.origins(judge.few_step_end, few, len(SIGMAS)),
    }


def _branch(work: Workspace, judge: Judge, what: tuple[str, float], seed: int) -> dict[str, Any]:
    name, keep = what
    branch, frequencies = BRANCHES[name]
    attention = attention_of(keep, branch, frequencies)
    start = work.train(warmup_config(work, f"branch-warmup-{name}-keep-{keep:g}", seed, attention))
    stage = f"branch-distill-{name}-keep-{keep:g}"
    student = work.train(_few_step(work, stage, seed, str(start), attention, "crossdistill-1"))
    return {"branch": name, "keep_ratio": keep, **judge.judge_student(student)}


def _frontier(work: Workspace, judge: Judge, arm: str, seed: int) -> dict[str, Any]:
    attention = attention_of(FRONTIER_KEEP_RATIO)
    start = work.train(warmup_config(work, "frontier-warmup", seed, attention))
    student = work.train(_few_step(work, f"frontier-{arm}", seed, str(start), attention, arm))
    return {"arm": arm, **judge.judge_student(student)}
