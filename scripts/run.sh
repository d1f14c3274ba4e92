#!/usr/bin/env bash
# Run a command in one of the project's two environments, setting it up on first use:
#     scripts/run.sh indexcache-search
#     scripts/run.sh pytest
#     scripts/run.sh --sglang pytest -m "sglang and not slow"             (SGLang 0.5.23 on CPU: Linux, 11 GB)
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if [ "${1:-}" = --sglang ]; then
  shift
  venv=${INDEXCACHE_SGLANG_VENV:-$root/.venv-sglang}
  constraints=$root/scripts/constraints-sglang.txt
  projects=(-e "$root[dev,sglang]" -e "$root/tests/sglang_cpu")
  export INDEXCACHE_REQUIRE_SGLANG=1 # its absence is a failure, not a skip
else
  venv=${INDEXCACHE_VENV:-$root/.venv}
  constraints=$root/scripts/constraints.txt
  projects=(-e "$root[dev]")
fi
stamp=$venv/.installed-from
wanted=$(cat "$root/pyproject.toml" "$root/tests/sglang_cpu/pyproject.toml" "$constraints" | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  echo "Setting up $venv (a few minutes, once)" >&2
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed" >&2; exit 2; }
  python3 -m venv "$venv"
  "$venv/bin/pip" install -q -c "$constraints" "${projects[@]}"
  echo "$wanted" > "$stamp"
fi
export PATH=$venv/bin:$PATH
exec "$@"
