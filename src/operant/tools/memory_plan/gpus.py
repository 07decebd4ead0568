"""GPUs as data: what a plan and a simulation need to know of each.

Memory, dense bfloat16 rate and memory bandwidth are the makers' numbers: NVIDIA's data sheets "A100 Tensor Core GPU"
(2021; SXM), "H100 Tensor Core GPU" (2023; SXM, half of the rate that is given with sparsity), "H200 Tensor Core GPU"
(2023; SXM), "L40S" (2023), "L4" (2023) and "Ada GPU architecture" (2022; RTX 4090, products with float32 sums); AMD's
data sheets "Instinct MI250X" (2021; one of its two dies, which torch sees as a GPU each) and "Instinct MI300X" (2023).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A GPU by its maker's numbers."""

    name: str
    memory: float
    """Bytes."""
    rate: float
    """Dense bfloat16 operations a second."""
    bandwidth: float
    """Bytes a second that it reads of its memory."""


GPUS = {
    "a100-40": Gpu("A100 40 GB", 40e9, 312e12, 1.555e12),
    "a100-80": Gpu("A100 80 GB", 80e9, 312e12, 2.039e12),
    "h100": Gpu("H100 80 GB", 80e9, 989e12, 3.35e12),
    "h200": Gpu("H200 141 GB", 141e9, 989e12, 4.8e12),
    "l4": Gpu("L4 24 GB", 24e9, 121e12, 0.3e12),
    "l40s": Gpu("L40S 48 GB", 48e9, 362e12, 0.864e12),
    "rtx4090": Gpu("RTX 4090 24 GB", 24e9, 165e12, 1.008e12),
    "mi250x": Gpu("MI250X 64 GB, one die", 64e9, 191.5e12, 1.6e12),
    "mi300x": Gpu("MI300X 192 GB", 192e9, 1307e12, 5.3e12),
}
