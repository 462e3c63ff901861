"""Reading checkpoints: Hugging Face directories, hub ids, GGUF files and loose tensor files."""

from specbuild.checkpoint.files import open_tensors
from specbuild.checkpoint.reader import Checkpoint, open_checkpoint
from specbuild.checkpoint.tokenizer import TokenizerAssets
from specbuild.checkpoint.weights import WeightSource, check_finite

__all__ = ["Checkpoint", "TokenizerAssets", "WeightSource", "check_finite", "open_checkpoint", "open_tensors"]
