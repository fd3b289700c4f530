"""Runs the outer loop over sockets and disks."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # otherwise gRPC logs every connection that ends
