"""The `tandem` command: one file a command, and nothing imported before it is needed."""

import os

# gRPC reads it when it is imported, here and in the processes that are started: else each handshake with a stranger,
# and each connection that ends, is a line of its own on stderr.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
