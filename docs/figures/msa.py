"""Draws docs/figures/msa.svg: which keys one query reads under dense attention and under MSA."""

import random
from pathlib import Path

CELL, BLOCKS, ROWS, KEPT = 18, 16, 16, 4


def main() -> None:
    rng = random.Random(4)
    parts = []

    def rect(x, y, fill, stroke="#c9d1d9"):
        parts.append(
            f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" rx="2" fill="{fill}" '
            f'stroke="{stroke}"/>'
        )

    def text(x, y, words, size=13, weight="normal"):
        parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}">{words}</text>'
        )

    panels = (
        (20, "1. proxy scores every block", lambda row, kept: range(row + 1), "#d5e8d4"),
        (340, "2. keeps the best K, its own always", lambda row, kept: kept, "#f0883e"),
        (660, "3. main attention reads only these", lambda row, kept: kept, "#1f6feb"),
    )
    kept_of_row = []
    for row in range(ROWS):
        others = rng.sample(range(row), min(row, KEPT - 1))
        kept_of_row.append({*others, row})
    for x0, title, chosen, colour in panels:
        text(x0, 24, title, 14, "bold")
        for row in range(ROWS):
            for column in range(row + 1):
                marked = column in set(chosen(row, kept_of_row[row]))
                rect(x0 + column * CELL, 40 + row * CELL, colour if marked else "#f6f8fa")
        text(x0, 40 + ROWS * CELL + 18, "key blocks &#8594;", 12)
    text(20, 40 + ROWS * CELL + 44, "KL loss: the proxy learns where the main attention looks", 14)
    width, height = 660 + BLOCKS * CELL + 20, 40 + ROWS * CELL + 60
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" fill="#57606a">' + "".join(parts) + "</svg>\n"
    )
    Path(__file__).with_name("msa.svg").write_text(svg)


if __name__ == "__main__":
    main()
