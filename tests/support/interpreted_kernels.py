"""Checks the Triton kernels on the CPU, in a process of its own with TRITON_INTERPRET=1; prints the formats checked.

    python -m tests.support.interpreted_kernels EVERY

EVERY: of how many of the cases' payload formats one is checked.
"""

import sys

from geotrain.kernels import triton_ops
from tests.support.kernel_cases import PAYLOAD_FORMATS, check_adam, check_quantize, check_rotate, format_id

for fmt in PAYLOAD_FORMATS[:: int(sys.argv[1])]:
    for numel in (0, 33, fmt.block + 69):
        check_quantize(triton_ops, fmt, numel, moves_anchor=False)
    print(format_id(fmt))
for shape in ((1, 1, 1, 2), (3, 2, 9, 10)):
    check_rotate(triton_ops, shape)
for numel in (0, 1, 1500):
    check_adam(triton_ops, numel)
