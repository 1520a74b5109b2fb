"""Regenerates `tandem/protocol/generated/` from `proto/`: `python -m tandem.protocol.generate [OUT]`.

protoc writes absolute imports (`from tandem.v1 import …`), but the code is in `tandem.protocol.generated`, so the
imports are rewritten. A test generates the files into an empty folder and compares them.
"""

import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "proto"
OUT = ROOT / "tandem" / "protocol" / "generated"


def generate(out: Path = OUT) -> list[Path]:
    """Generate message classes, stubs and service code for all schemas into the folder `out`; return the files."""
    sources = sorted(str(p.relative_to(PROTO)) for p in PROTO.rglob("*.proto"))
    well_known = str(files("grpc_tools") / "_proto")
    arguments = [
        f"-I{PROTO}",
        f"-I{well_known}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
    ]
    # protoc runs in a subprocess, because it conflicts with a protobuf runtime that is already in use.
    if subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments, *sources], check=False).returncode != 0:
        raise SystemExit("protoc failed; see above")
    written = sorted(p for p in out.rglob("*_pb2*.py*") if "__pycache__" not in p.parts)
    for path in written:
        path.write_text(
            re.sub(
                r"^from tandem\.v1 import",
                "from tandem.protocol.generated.tandem.v1 import",
                path.read_text(),
                flags=re.M,
            )
        )
    return written


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    target.mkdir(parents=True, exist_ok=True)
    for file in generate(target):
        print(file)
