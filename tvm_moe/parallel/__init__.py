"""A layer over several processes of torch.distributed (gloo): by experts, or by the intermediate size.

`ExpertParallelMoE`: each rank holds some experts and its own tokens. `TensorParallelMoE`: each rank holds some columns of
every expert's intermediate, and all ranks the same tokens. `group` has what they need of torch.distributed.
"""

from .exchange import EXCHANGES
from .expert import ExpertParallelMoE
from .tensor import TensorParallelMoE

__all__ = ["EXCHANGES", "ExpertParallelMoE", "TensorParallelMoE"]
