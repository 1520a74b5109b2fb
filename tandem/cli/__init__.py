"""The `tandem` command: one file per command, and no import before it is needed."""

import os

# gRPC reads it at import, here and in child processes; otherwise each failed handshake and each closed connection
# prints a line on stderr.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
