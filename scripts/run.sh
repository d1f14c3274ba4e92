#!/usr/bin/env bash
# Run a command in the project's environment, setting it up on first use:
#     scripts/run.sh indexcache-search
#     scripts/run.sh pytest
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=${INDEXCACHE_VENV:-$root/.venv}
stamp=$venv/.installed-from
wanted=$(cat "$root/pyproject.toml" "$root/scripts/constraints.txt" | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  echo "Setting up $venv (a few minutes, once)" >&2
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed" >&2; exit 2; }
  python3 -m venv "$venv"
  "$venv/bin/pip" install -q -c "$root/scripts/constraints.txt" -e "$root[dev]"
  echo "$wanted" > "$stamp"
fi
export PATH=$venv/bin:$PATH
exec "$@"
