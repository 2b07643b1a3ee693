"""Take models that this project did not write through the full circle, and print a table of what became of each.

Every model of `zoo_models.py` is extracted, planned for four CPU ranks, verified against one device, exported, and trained from the
exported file. The same is done with a pipeline of two stages of two ranks each, if the model is a chain of at least two parts. Each
model runs in a process of its own.

    python tests/bench/bench_zoo.py [MODEL ...] [--page docs/models.md]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODELS = Path(__file__).with_name("zoo_models.py")
RANKS, BATCH = 4, 8
#: Seconds that a model may take.
TIMEOUT_S = 300
#: Lines of the page between which the table stands.
BEGIN, END = "<!-- table -->", "<!-- end of table -->"

#: The models by family, in the order of the table.
FAMILIES = {
    "classification": (
        *("alexnet", "vgg11_bn", "resnet18", "resnext", "squeezenet", "densenet", "googlenet", "mobilenet_v2"),
        *("mobilenet_v3", "shufflenet", "mnasnet", "ghostnet", "efficientnet", "regnet", "res2net", "se_resnet", "dla"),
        *("vit", "swin", "mixer", "gmlp", "resmlp", "convnext", "pvt", "crossformer", "poolformer", "convmixer"),
        *("uniformer", "cswin", "two_heads", "genet"),
    ),
    "detection, segmentation": ("fcn_head", "unet"),
    "language": (
        *("block_stack", "lstm_language", "gru_classifier", "text_cnn", "bert_with_mask", "gpt_interleaved", "t5"),
        *("seq2seq", "random_parts", "gpt2", "llama", "stacked_lstm"),
    ),
    "speech": ("speech", "conformer"),
    "recommendation": ("wide_and_deep", "deepfm", "dlrm", "ncf"),
    "generative": ("dcgan_generator", "dcgan_discriminator", "vae", "autoencoder", "diffusion"),
    "others": (
        "clip",
        "siamese",
        "graph_convolution",
        "outputs_of_several_kinds",
        "weighted_norm",
        "sync_norms",
        "mixed_sharing",
    ),
}


def run(name: str) -> dict[str, Any]:
    """Take one model through the circle, and return its row."""
    import autoddl
    from autoddl.costmodel.errors import UserError

    model, row = f"{MODELS}:{name}", {"model": name}
    try:
        plan = autoddl.plan(model, cluster="local-cpu", devices_per_node=RANKS, batch=BATCH)
    except UserError as error:
        return {**row, "verdict": f"refused: {error}"}
    layers = plan.graph.layers
    total = sum(layer.num_parameters for layer in layers)
    kept = sum(layer.num_parameters for layer in layers if layer.kind == "opaque")
    row |= {"parameters": total, "layers": len(layers), "share": 1 - kept / max(total, 1)}
    row["verdict"] = verified(plan, model)
    if row["verdict"].startswith("fails"):
        return row
    return {**row, "export": exported(plan, model), "pipeline": pipelined(model)}


def verified(plan: Any, model: str) -> str:
    """Verify a plan on ranks, and return the verdict."""
    try:
        verification = plan.verify(ranks=RANKS, model=model)
    except Exception as error:
        return f"fails: {str(error).splitlines()[0][:150]}"
    last = str(verification).splitlines()[-1]
    return "right" if last.startswith("Right") else f"off: {last.strip()[:150]}"


def pipelined(model: str) -> str:
    """Take a model through a pipeline of two stages of two ranks each, and return what became of it."""
    import autoddl
    from autoddl.costmodel.errors import UserError

    try:
        plan = autoddl.price(model, cluster="local-cpu", devices_per_node=RANKS, batch=BATCH, pp=2, dp=2, micro_batch=2)
    except UserError as error:
        return f"no chain: {str(error)[:150]}"
    verdict = verified(plan, model)
    trained = exported(plan, model) if verdict == "right" else "trains"
    return verdict if trained in ("trains", "no loss") else f"file {trained}"


def exported(plan: Any, model: str) -> str:
    """Export a plan, train two steps from the file, and return what became of it."""
    from autoddl.costmodel.errors import UserError

    if not plan.graph.has_loss:
        return "no loss"
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / file) for file in ("plan.json", "model.py")]
        plan.save(paths[0])
        try:
            plan.export(paths[1], model=model)
        except UserError as error:
            return f"refused: {str(error)[:150]}"
        # The file compares its loss with that of the plain model before it trains.
        command = [sys.executable, "-m", "autoddl", "launch", *paths, "--", "--steps", "2"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    lines = [line for line in done.stdout.splitlines() if "loss" in line]
    if done.returncode or len(lines) != 2:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        return f"fails: {said[-1][:150]}"
    return "trains"


def row_of(name: str) -> dict[str, Any]:
    """Run one model in a process of its own."""
    try:
        command = [sys.executable, __file__, "--one", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]
    except subprocess.TimeoutExpired:
        return {"model": name, "verdict": f"fails: takes more than {TIMEOUT_S} s"}
    except (IndexError, ValueError):
        return {"model": name, "verdict": f"crashes: {(done.stderr.strip().splitlines() or ['no output'])[-1][:120]}"}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table, those with failures first."""
    family_of = {name: family for family, names in FAMILIES.items() for name in names}
    order = sorted(rows, key=lambda row: (row["verdict"] == "right", is_served(row)))
    lines = [
        "| model | family | parameters | layers | all strategies | verify on 4 ranks | exported file | pipeline |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in order:
        share = f"{row['share']:.1%}" if "share" in row else ""
        figures = f"{row.get('parameters', 0):,} | {row.get('layers', '')} | {share}"
        name = row["model"]
        became = f"{row['verdict']} | {row.get('export', '')} | {row.get('pipeline', '')}"
        lines.append(f"| {name} | {family_of.get(name, '')} | {figures} | {became} |")
    return "\n".join(lines)


def is_served(row: dict[str, Any]) -> bool:
    """Return whether the exported file trains, and the pipeline is right if there is one."""
    pipeline = row.get("pipeline", "")
    return row.get("export", "") in ("trains", "no loss") and (pipeline == "right" or pipeline.startswith("no chain"))


def main() -> None:
    """Run the models, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("models", nargs="*", help="models to run; by default all of them")
    parser.add_argument("--page", type=Path, help="page whose table is replaced")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run(options.one)))
        return
    names = options.models or [name for names in FAMILIES.values() for name in names]
    rows: list[dict[str, Any]] = []
    for name in names:
        rows.append(row_of(name))
        row = rows[-1]
        print(f"{name}: {row['verdict']}; {row.get('export', '')}; pipeline: {row.get('pipeline', '')}", flush=True)
        if options.page:
            write(options.page, rows)
    print(f"\n{table(rows)}")


def write(page: Path, rows: list[dict[str, Any]]) -> None:
    """Replace the table of a page."""
    right = sum(row["verdict"] == "right" for row in rows)
    text = page.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    summary = f"{right} of {len(rows)} models are right."
    page.write_text(f"{before}{BEGIN}\n\n{summary}\n\n{table(rows)}\n\n{END}{after}")


if __name__ == "__main__":
    main()
