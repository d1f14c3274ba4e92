"""Where SGLang is required, a missing one is an error; elsewhere these tests are skipped."""

import os

if os.environ.get("INDEXCACHE_REQUIRE_SGLANG"):
    import sglang  # noqa: F401

    import dsa_cpu_platform  # noqa: F401
