"""Tables for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Table:
    """A titled table; numbers are rounded only when written as Markdown."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str | float | int | None, ...]] = field(default_factory=list)

    def add(self, *cells: str | float | int | None) -> None:
        """Append a row.

        Raises:
            ValueError: the number of cells is not that of the columns.
        """
        if len(cells) != len(self.columns):
            raise ValueError(f"cells: got {len(cells)}; must be {len(self.columns)}")
        self.rows.append(cells)

    def to_dict(self) -> dict:
        """Plain data for JSON."""
        return {"title": self.title, "columns": list(self.columns), "rows": [list(r) for r in self.rows]}

    def markdown(self) -> str:
        """The table as Markdown."""
        lines = [f"### {self.title}", "", "| " + " | ".join(self.columns) + " |", "|" + " --- |" * len(self.columns)]
        return "\n".join(lines + ["| " + " | ".join(map(_cell, row)) + " |" for row in self.rows])


def _cell(value: str | float | int | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
