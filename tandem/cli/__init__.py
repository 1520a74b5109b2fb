"""The `tandem` command. Each subcommand has its own module, and imports what it needs only when it runs."""

import os

# gRPC reads this variable at import, here and in child processes. Without it, each failed handshake and each closed
# connection prints a line on stderr.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
