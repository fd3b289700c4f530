"""The outer loop's sockets and disk."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else gRPC tells of every connection that ends
