"""NOSA's eviction heads on transformers' dense models: the importance of a token for any query (arXiv 2510.13602)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from indexcache_dense.hf.patch_attention import Attend
from indexcache_lab.dense import key_heads
from indexcache_lab.eviction.attention import attend_with_bias
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.errors import SearchError
from sglang_indexcache.io.naming import naming

FILE = Path("eviction_heads") / "heads.safetensors"  # apart from the model's own, which engines load by their suffix
BiasUse = Literal["always", "training"]
USES: tuple[BiasUse, ...] = get_args(BiasUse)


class EvictionHeads(nn.Module):
    """A bias for each token and key head of each layer, computed from the token's values.

        b[g, t] = scale[g] softplus(weight[g] . v[t]),  v[t] the values of all key heads one after the other

    It is added to the scaled products before the softmax (equation 8), which gives it a gradient, and the values a
    further one, as in the official code. The scale begins at 0, so that nothing changes at first.

    Args:
        layers: layers of the model.
        groups: key heads.
        dim: dimensions of a value.
        use: `always` adds it wherever pages are selected (the paper's ED-DMA); `training` uses its gradient only, and
            attends without it (S-DMA), like kernels without a bias.
        detach: give values no gradient through the bias.
    """

    def __init__(self, layers: int, groups: int, dim: int, use: BiasUse, *, detach: bool = False) -> None:
        super().__init__()
        self.use, self.detach = use, detach
        width = groups * dim
        self.weight = nn.Parameter(torch.randn(layers, groups, width) * width**-0.5)
        self.scale = nn.Parameter(torch.zeros(layers, groups))

    @classmethod
    def like(cls, config: Any, use: BiasUse, seed: int, *, detach: bool = False) -> Self:
        """Make heads for a model of this configuration; `seed` decides the weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(config.num_hidden_layers, *key_heads(config), use, detach=detach)

    def forward(self, layer: int, value: Tensor) -> Tensor:
        """Compute `[batch, key_heads, keys]` float32 of `[batch, key_heads, keys, dim]`."""
        with torch.autocast(value.device.type, enabled=False):
            vectors = (
                (value.detach() if self.detach else value).float().transpose(1, 2).flatten(2)
            )  # [batch, keys, key_heads * dim]
            bias = F.softplus(vectors @ self.weight[layer].float().mT) * self.scale[layer].float()
        return bias.transpose(1, 2)

    def bias(self, layer: int, value: Tensor) -> Tensor | None:
        """Return the bias that is served, by `use`; see `hf.pages.Importance`."""
        return self(layer, value) if self.use == "always" else None

    def attend(  # noqa: PLR0917
        self, layer: int, attend: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float
    ) -> Tensor:
        """Attend in a layer with its bias, according to `use`; see `hf.pages.Importance`."""
        training = torch.is_grad_enabled() and self.scale.requires_grad
        if self.use == "training" and not training:
            return attend(query, key, value, mask)[0]
        bias = self(layer, value)
        if training and query.is_cuda:  # eager attention keeps [batch, heads, queries, keys] for the gradients
            biased = attend_with_bias(query, key, value, mask, bias, scaling=scaling)
        else:
            by_head = bias.repeat_interleave(query.shape[1] // key.shape[1], 1)[:, :, None]
            # Masked keys have the lowest number of the dtype; the sum with a negative bias must not overflow.
            biased_mask = (mask + by_head).clamp_min(torch.finfo(mask.dtype).min).to(mask.dtype)
            biased = attend(query, key, value, biased_mask)[0]
        if self.use == "always":
            return biased
        with torch.no_grad():
            plain = attend(query, key, value, mask)[0]
        return biased + (plain - biased).detach()

    def save(self, path: Path) -> None:
        """Write the weights, float32."""
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: item.detach().float().cpu().contiguous() for name, item in self.state_dict().items()}
        with naming(path):
            save_file(tensors, path, metadata={"use": self.use})

    @classmethod
    def load(cls, path: Path, config: Any) -> Self:
        """Read heads written by `save`, for a model of this configuration.

        Raises:
            SearchError: if the file holds something else.
        """
        heads = cls.like(config, "always", 0)
        try:
            with safe_open(path, "pt") as file:
                use = (file.metadata() or {}).get("use")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except (OSError, SafetensorError) as error:
            raise SearchError(f"{path}: can't be read: {str(error).splitlines()[0][:200]}") from None
        own = {name: list(item.shape) for name, item in heads.state_dict().items()}
        found = {name: list(item.shape) for name, item in tensors.items()}
        if use not in USES or found != own:
            raise SearchError(f"{path}: holds {json.dumps(found)[:200]}, expected eviction heads {json.dumps(own)}")
        if not all(bool(item.isfinite().all()) for item in tensors.values()):
            raise SearchError(f"{path}: a weight is not finite")
        heads.use = use
        heads.load_state_dict(tensors)
        return heads


def attach(model: Any, heads: EvictionHeads) -> None:
    """Attach eviction heads to `model`; they move with it to its device, but not into its checkpoint."""
    model.importance = heads.to(model.device)


def attach_saved(engine: TransformersEngine) -> None:
    """Attach the eviction heads in the model's folder to an engine's model, if there are any.

    Raises:
        SearchError: if they are damaged, or another model's.
        ModelConfigError: if something in the folder changed since the model was loaded.
    """
    if engine.files is not None and (path := engine.files.folder / FILE).is_file():
        attach(engine.torch_model, EvictionHeads.load(path, engine.torch_model.config))
        engine.check_unchanged()  # the digest was taken before they were read
