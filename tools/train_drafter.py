"""Trains a drafter for a target: EAGLE-3, EAGLE-1, Medusa, a small draft model, or a static n-gram table.

Needs the extra `train` (torch). Run as `python -m tools.train_drafter TARGET --kind eagle3 --prompts FILE -o OUT`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from specrun.errors import UserError

KINDS = ("eagle3", "eagle", "medusa", "draft-model", "ngram")
EXISTING = click.Path(exists=True, path_type=Path)


@click.command()
@click.argument("target")
@click.option("--kind", required=True, type=click.Choice(KINDS), help="What to train.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder for weights and card.")
@click.option("--data", type=EXISTING, help="Conversations to train on: an .npz file or a folder of them.")
@click.option("--prompts", type=EXISTING, help="Prompts that the target answers: .jsonl, or .txt with one a line.")
@click.option("--bundle", type=EXISTING, help="Generate with this compiled bundle. [torch in bf16, larger batches]")
@click.option("--self-written", type=int, default=0, show_default=True, help="Instructions the target writes itself.")
@click.option("--answer-tokens", type=int, default=192, show_default=True, help="Longest generated answer.")
@click.option("--measure", type=EXISTING, help="Questions to measure acceptance on; never trained on.")
@click.option("--tokens", type=int, default=4_000_000, show_default=True, help="Tokens to train on, repeats counted.")
@click.option("--batch-tokens", type=int, default=2048, show_default=True, help="Tokens in a step.")
@click.option("--draft-vocabulary", type=int, default=4096, show_default=True, help="LM-head rows trained against.")
@click.option("--rate", type=float, default=0.02, show_default=True, help="Learning rate of Muon.")
@click.option("--start-from", type=EXISTING, help="A checkpoint.pt of an earlier run to start from.")
@click.option("--work", type=click.Path(path_type=Path), help="Folder of caches and checkpoints. [OUTPUT/work]")
@click.option("--threads", type=int, default=0, help="CPU threads. [all]")
@click.option("--seed", type=int, default=0, show_default=True)
def main(target: str, kind: str, output: Path, threads: int, **options: Any) -> None:
    """Train a drafter of KIND for TARGET, a Hugging Face directory, a hub id or a .gguf file.

    Interrupted runs go on where they stopped when started again with the same --work folder.
    """
    console = Console(stderr=True)
    try:
        _run(target, kind, output, threads, options, console)
    except UserError as error:
        console.print(f"error: {error}", style="red", markup=False)
        raise SystemExit(2) from None


def _run(target: str, kind: str, output: Path, threads: int, options: dict[str, Any], console: Console) -> None:
    try:
        import torch
    except ImportError:
        raise UserError("training needs torch, which is not installed; install the extra: specbuild[train]") from None
    from tools.train.loop import Plan
    from tools.train.pipeline import Request, run
    from tools.train.selfgen import Recipe

    if threads:
        torch.set_num_threads(threads)
    seed = options["seed"]
    plan = Plan(
        tokens=options["tokens"],
        batch_tokens=options["batch_tokens"],
        muon_rate=options["rate"],
        vocabulary=options["draft_vocabulary"],
        seed=seed,
    )
    request = Request(
        target=target,
        kind=kind,
        output=output,
        work=options["work"] or output / "work",
        plan=plan,
        recipe=Recipe(options["self_written"], options["answer_tokens"], seed=seed),
        **{name: options[name] for name in ("data", "prompts", "bundle", "measure", "start_from")},
    )
    run(request, console)


if __name__ == "__main__":
    main()
