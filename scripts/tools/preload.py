"""Imported once by the fork server: the slow imports, and nothing that computes or reads the environment."""

import torch

torch.set_num_threads(1)
import sglang.benchmark.one_batch  # noqa: E402, F401
