"""A self-contained HTML page with plots: what a training run with MSA showed.

Input is a plain dict (see `write_report`), so that other training scripts can use it. Needs
matplotlib.
"""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path

MSA, DENSE, GREY, GREEN = "#f0883e", "#1f6feb", "#8b949e", "#2da44e"


def write_report(folder: str | Path, data: dict) -> Path:
    """Writes index.html, the plots as PNG and data as report.json into `folder`.

    data: title, summary (list of [name, value]), warmup_until (step),
        runs {"msa", "dense"}: step, loss, kl, evaluated, held_out, recall (see History of
        examples/bytelm/train.py), choices (per layer: [Hp][rows][blocks]), times
        (attention_times), sample (text), notes (list of text).

    Returns the path of index.html.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    plots = []
    with plt.rc_context({"figure.dpi": 130, "axes.grid": True, "grid.alpha": 0.25, "font.size": 9}):
        for name, caption, draw in _PLOTS:
            figure = draw(plt, data)
            if figure is None:
                continue
            path = folder / f"{name}.png"
            figure.savefig(path, bbox_inches="tight")
            plt.close(figure)
            plots.append((path, caption))
    (folder / "report.json").write_text(json.dumps(data, indent=1))
    page = folder / "index.html"
    page.write_text(_page(data, plots))
    return page


# --- plots --------------------------------------------------------------------------------------
def _phase(axes, data) -> None:
    axes.axvspan(0, data["warmup_until"], color=GREY, alpha=0.12, lw=0)
    axes.text(
        data["warmup_until"] / 2,
        0.98,
        "warm-up",
        transform=axes.get_xaxis_transform(),
        ha="center",
        va="top",
        color="#57606a",
    )


def _loss(plt, data):
    figure, axes = plt.subplots(figsize=(7, 3.6))
    _phase(axes, data)
    top = 0.0
    for name, colour in (("dense", DENSE), ("msa", MSA)):
        run = data["runs"].get(name)
        if not run or not run["step"]:
            continue
        axes.plot(run["step"], run["loss"], color=colour, alpha=0.25, lw=0.8)
        label = {"msa": "MSA", "dense": "dense"}[name]
        axes.plot(run["evaluated"], run["held_out"], "o-", color=colour, ms=3.5, label=label)
        top = max([top, *run["held_out"][1:2]])
    axes.set(xlabel="step", ylabel="nats a byte", title="Loss on held-out files (thin: training)")
    if top:
        axes.set_ylim(top=1.15 * top)
    axes.legend()
    return figure


def _kl(plt, data):
    run = data["runs"].get("msa")
    if not run or not run["kl"]:
        return None
    figure, axes = plt.subplots(figsize=(7, 3.2))
    _phase(axes, data)
    for layer, values in enumerate(zip(*run["kl"])):
        axes.plot(run["step"], values, lw=1, label=f"layer {layer}")
    axes.set(xlabel="step", ylabel="KL, nats", title="KL between main attention and proxy")
    axes.set_yscale("log")
    axes.legend()
    return figure


def _recall(plt, data):
    run = data["runs"].get("msa")
    if not run or not run["recall"]:
        return None
    figure, axes = plt.subplots(figsize=(7, 3.4))
    _phase(axes, data)
    styles = {"best": (GREEN, "best possible"), "selected": (MSA, "the proxy's selection"),
              "random": (GREY, "random selection")}  # fmt: skip
    for name, (colour, label) in styles.items():
        layers = list(zip(*(r[name] for r in run["recall"])))
        for values in layers:
            axes.plot(run["evaluated"], values, color=colour, lw=0.7, alpha=0.4)
        mean = [sum(x) / len(x) for x in zip(*layers)]
        axes.plot(run["evaluated"], mean, "o-", color=colour, ms=3.5, label=label)
    axes.set(
        xlabel="step",
        ylabel="share of attention mass",
        ylim=(0, 1.02),
        title="Dense attention mass inside the selected blocks (thin: layers)",
    )
    axes.legend(loc="lower right")
    return figure


def _choices(plt, data):
    layers = data.get("choices")
    if not layers:
        return None
    heads = len(layers[0])
    figure, grid = plt.subplots(
        heads,
        len(layers),
        figsize=(2.5 * len(layers) + 1, 2.5 * heads),
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    for layer, pictures in enumerate(layers):
        for head, picture in enumerate(pictures):
            axes = grid[head][layer]
            image = axes.imshow(
                picture, aspect="auto", cmap="magma", vmin=0, vmax=1, interpolation="nearest",
                extent=(0, len(picture[0]), data["context"], 0),
            )  # fmt: skip
            axes.grid(False)
            axes.set_title(f"layer {layer}, proxy head {head}", fontsize=8)
            if layer == 0:
                axes.set_ylabel("position of the query")
            if head == heads - 1:
                axes.set_xlabel("key block")
    figure.colorbar(image, ax=grid, shrink=0.6, label="share of queries that keep the block")
    return figure


def _times(plt, data):
    times = data.get("times")
    if not times:
        return None
    figure, axes = plt.subplots(figsize=(7, 1.9))
    colours = {"selection": GREEN, "forward": MSA, "backward": DENSE}
    for place, name in enumerate(("dense", "msa")):
        left = 0.0
        for part, colour in colours.items():
            ms = times[name].get(part, 0.0)
            axes.barh(place, ms, left=left, color=colour, label=part if name == "msa" else None)
            if ms > 0:
                axes.text(
                    left + ms / 2, place, f"{ms:.0f}", ha="center", va="center", color="white"
                )
            left += ms
    axes.set_yticks([0, 1], ["dense", "MSA"])
    axes.set(xlabel="ms, all layers of one step", title="Where the attention's time goes")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


_PLOTS = (
    ("loss", "Both models have the same weights at the start, the same data and budget.", _loss),
    ("kl", "The proxy's loss, layer by layer. In the warm-up it is taken over all visible keys, "
     "afterwards over the selected ones.", _kl),
    ("recall", "Tokens that see more blocks than they may keep, held-out files. The token's own "
     "block is kept in all three.", _recall),
    ("choices", "Which blocks the queries of one held-out file keep.", _choices),
    ("times", "Selection, forward and backward of the attention layers on one training batch.",
     _times),
)  # fmt: skip


# --- page ---------------------------------------------------------------------------------------
def _page(data, plots) -> str:
    def image(path: Path, caption: str) -> str:
        code = base64.b64encode(path.read_bytes()).decode()
        return (
            f'<figure><img alt="{html.escape(path.stem)}" src="data:image/png;base64,{code}">'
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        )

    rows = "".join(
        f"<tr><td>{html.escape(str(k))}</td><td>{html.escape(str(v))}</td></tr>"
        for k, v in data["summary"]
    )
    notes = "".join(f"<p>{html.escape(n)}</p>" for n in data.get("notes", []))
    sample = data.get("sample")
    sample = f"<h2>Text it writes</h2><pre>{html.escape(sample)}</pre>" if sample else ""
    title = html.escape(data["title"])
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #24292f; }}
table {{ border-collapse: collapse; }} td {{ padding: .2rem .9rem .2rem 0; }}
td + td {{ font-variant-numeric: tabular-nums; font-weight: 600; }}
figure {{ margin: 2rem 0; }} img {{ max-width: 100%; }} figcaption {{ color: #57606a; }}
pre {{ background: #f6f8fa; padding: 1rem; overflow: auto; }}
</style></head><body><h1>{title}</h1><table>{rows}</table>{notes}
{"".join(image(*p) for p in plots)}{sample}</body></html>
"""
