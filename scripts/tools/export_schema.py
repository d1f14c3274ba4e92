"""Write the JSON Schema of pattern files into the package."""

import json
from pathlib import Path

import sglang_indexcache
from sglang_indexcache import PatternFile

if __name__ == "__main__":
    path = Path(sglang_indexcache.__file__).parent / "pattern_file.schema.json"
    path.write_text(json.dumps(PatternFile.json_schema(), indent=2) + "\n")
    print(path)
