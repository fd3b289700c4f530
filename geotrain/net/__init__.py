"""The outer loop's sockets and disk."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # otherwise gRPC logs every connection that ends
