"""What an engine can evaluate: patterns of letters, and plans for keys."""

from __future__ import annotations

from indexcache_search.errors import SearchError
from indexcache_search.lab.key_delta.plan import METHODS, KeyPlan
from sglang_indexcache import Pattern
from sglang_indexcache.errors import PatternError

Plan = Pattern | KeyPlan


def plan_from_key(key: str) -> Plan:
    """Read back the `key` of a plan.

    Raises:
        PatternError: if it is something else.
    """
    if key.partition("|")[0] not in METHODS:
        return Pattern.from_key(key)
    try:
        return KeyPlan.from_key(key)
    except SearchError as error:
        raise PatternError(str(error)) from None


def order(plan: Plan) -> tuple[str, str]:
    """Plans in this order follow those whose first layers run alike."""
    return (plan.method, plan.key) if isinstance(plan, KeyPlan) else (str(plan.selection), plan.letters)
