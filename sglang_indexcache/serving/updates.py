"""Updates of weights while a server runs: the pattern is proven again, or known not to be proven any more.

An update from disk brings a whole checkpoint. It is refused, and nothing changes, if the names of its tensors say that
an F layer would have no indexer. Otherwise indexers are marked as before the first load, and those that were not loaded
are put back, so that no request ever meets a marked one.

Other updates may bring some tensors only, in several calls: the pattern is not proven while one is under way, and is
proven again at its end. Weights whose memory was released come back with anything in them, so indexers are marked then,
and a prompt that meets a marked one ends the server. Indexers are counted again after every update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sglang_indexcache.checkpoint.checkpoint import Checkpoint
from sglang_indexcache.io.errors import IndexCacheError, ProofError
from sglang_indexcache.io.refusal import refuse
from sglang_indexcache.serving import engines
from sglang_indexcache.serving.preflight import Preflight
from sglang_indexcache.serving.proof import agree, indexer_tensors, look_at, mark_unloaded
from sglang_indexcache.serving.ranks import first_problem

if TYPE_CHECKING:
    from torch import Tensor

FROM_DISK = "update_weights_from_disk"
_LOADS = ("update_weights_from_distributed", "update_weights_from_tensor", "update_weights_from_ipc")
_END, _RESUME = "end_weight_update", "resume_memory_occupation"
_WEIGHTS = "weights"  # SGLang's name for that part of the memory; no names mean all parts
_DRAFT = "draft"


def around(method: str) -> Callable[..., Any]:
    """Return the hook around a scheduler's method that updates weights, or releases or resumes their memory."""

    def hook(original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
        runner = manager.tp_worker.model_runner
        plan = engines.plan_of_runner(runner)
        tags = getattr(recv_req, "tags", None)
        if plan is None or (tags and _WEIGHTS not in tags) or getattr(recv_req, "selector", None) == _DRAFT:
            return original(manager, recv_req)
        stages = int(getattr(runner.server_args, "pp_size", 1) or 1)
        if method == FROM_DISK and isinstance(plan, Preflight) and stages == 1:
            return _from_disk(plan, runner, recv_req.model_path, lambda: original(manager, recv_req))
        plan.proven.lose(f"{method} was called" + (f" on {stages} pipeline stages" if stages > 1 else ""))
        reply = original(manager, recv_req)
        if not isinstance(plan, Preflight) or stages > 1:
            return reply
        released = method == _RESUME and not getattr(runner.server_args, "enable_weights_cpu_backup", False)
        if released:
            mark_unloaded(plan.family.sglang, runner.model)
            plan.proven.lose("memory of weights was released, and nothing was loaded since")
        elif method in (_END, _RESUME) or (method in _LOADS and getattr(manager, "_session", None) is None):
            _prove_again(plan, runner, method, reply)
        _count_again(plan, runner)
        return reply

    return hook


def _prove_again(plan: Preflight, runner: Any, method: str, reply: Any) -> None:
    """Prove the pattern after an update that may have brought some tensors only; fail one that ends without a proof."""
    if not getattr(reply, "success", True):
        return
    problem = agree(plan, runner, look_at(plan, runner))
    if problem is None:
        return
    plan.proven.lose(f"{method}: {problem}")
    if method == _END:
        reply.success, reply.message = False, f"indexcache: the update has ended, but the pattern is {plan.proven.lost}"


def _count_again(plan: Preflight, runner: Any) -> None:
    """Count indexers again, and look at this rank's weights in the first prompt if the pattern is not proven then."""

    def check() -> None:
        problem = look_at(plan, runner).problem if plan.proven.lost else None
        if problem is not None:
            raise ProofError(f"a prompt came when the pattern was {plan.proven.lost}; now {problem}")

    for counter in plan.proven.counters:
        counter.again(check)


def _from_disk(plan: Preflight, runner: Any, path: str, update: Callable[[], Any]) -> Any:
    problem = first_problem(_misfit(plan, path))
    if problem is not None:
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

        return UpdateWeightFromDiskReqOutput(success=False, message=f"indexcache: {problem}; nothing was updated")
    marked = _Marked(plan, runner.model)
    reply = update()
    untouched = not reply.success and marked.untouched()
    report = None if untouched else look_at(plan, runner)
    marked.put_back()
    if report is None:
        report = look_at(plan, runner)
    elif not reply.success:
        report = replace(report, problem=f"an update from {path} failed half-way: {reply.message}")
    problem = agree(plan, runner, report)
    if problem is None:
        _count_again(plan, runner)
        return reply
    plan.proven.lose(f"weights were updated from {path}: {problem}")
    if reply.success:
        reply.success, reply.message = False, f"indexcache: weights were updated, but the pattern is {plan.proven.lost}"
    return reply


def _misfit(plan: Preflight, path: str) -> str | None:
    """Return why the checkpoint at `path` can't run the pattern; `None` also where only loading can show it."""
    try:
        return next((str(error) for error in Checkpoint.read(path).misfits(plan.pattern)), None)
    except IndexCacheError:
        return None
    except Exception as error:  # the other ranks must know of it
        return f"{type(error).__name__}: {error}"


class _Marked:
    """The indexers of a loaded model that are marked as not loaded, with their former content in host memory."""

    def __init__(self, plan: Preflight, model: Any) -> None:
        tensors = indexer_tensors(plan.family.sglang, model)
        self._before: list[tuple[Any, str, Tensor]] = [
            (indexer, name, parameter.data.to("cpu", copy=True)) for _, indexer, name, parameter in tensors
        ]
        mark_unloaded(plan.family.sglang, model)

    def untouched(self) -> bool:
        """Return whether nothing was loaded into any of them."""
        return bool(self._before) and all(_has_nan(indexer, name) for indexer, name, _ in self._before)

    def put_back(self) -> None:
        """Restore those that were not loaded; end the process where that can't be done."""
        for indexer, name, before in self._before:
            if _has_nan(indexer, name):
                data = indexer.get_parameter(name).data
                if data.shape != before.shape or data.dtype != before.dtype:
                    refuse(f"an update changed {name} of an indexer to {tuple(data.shape)} and did not load it")
                data.copy_(before)


def _has_nan(indexer: Any, name: str) -> bool:
    return bool(indexer.get_parameter(name).data.float().isnan().any().item())
