"""transformers in float32 on a GGUF file: an independent reader of the file and the model."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file


class Reference:
    """A GGUF file's model, its weights dequantised."""

    def __init__(self, file: str):
        path = Path(file)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name
        )

    def write(self, folder: Path) -> None:
        """Write a model folder with the dequantised weights, which transformers cannot save itself."""
        config = self.model.config.to_dict()
        config.pop("quantization_config", None)
        (folder / "config.json").write_text(json.dumps(config, default=str))
        tensors = {name: tensor.contiguous() for name, tensor in self.model.state_dict().items()}
        if config["tie_word_embeddings"]:
            tensors.pop("lm_head.weight", None)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """[T, V]: log-probabilities of the next token after each token."""
        with torch.no_grad():
            logits_TV = self.model(torch.tensor([list(tokens)])).logits[0]
            return torch.log_softmax(logits_TV, -1).numpy()
