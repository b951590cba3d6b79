"""How gradients of all ranks become one."""

# No postponed annotations here: DDP compares the hook's annotations with the classes themselves.
import torch
import torch.distributed as dist


class Reduction:
    """How far the exchange of one backward has come."""

    def __init__(self) -> None:
        self.complete = False
        """Whether every bucket is on its way; they leave in order, each when all its gradients are there."""


def sum_gradients(reduction: Reduction, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: the sum over ranks.

    Each microbatch's loss carries its share of the global batch already, so that ranks with more microbatches than
    others count for more.
    """
    reduction.complete = reduction.complete or bucket.is_last()
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])
