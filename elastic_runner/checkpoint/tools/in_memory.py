"""What a state in a node's memory holds."""

from __future__ import annotations

from elastic_runner.checkpoint.snapshot import map_file, tensor_in
from elastic_runner.checkpoint.snapshot_source import Common, SnapshotSource, offers
from elastic_runner.checkpoint.tools.contents import Box, Contents, Entry
from elastic_runner.checkpoint.tools.stored import HeldTensor
from elastic_runner.coordination import Coordinator


def contents_in_memory(common: Common) -> Contents:
    """All of ``common``, whose memory can be mapped here; not copied. Raises Damaged, NotData, OSError."""
    ((offer,),) = offers([common], [common.lead.home])
    _, plain = SnapshotSource(offer, Coordinator()).head()
    boxes: dict[str, dict[tuple[int, ...], Box]] = {key: {} for key in common.lead.snapshot.tensors}
    for path, pieces in offer.near:
        view = map_file(path)
        for stored in pieces:
            piece = stored.piece
            if not piece.nbytes:
                continue
            tensor = HeldTensor(tensor=tensor_in(view, stored))
            boxes[piece.key][piece.offsets] = Box(offsets=piece.offsets, sizes=piece.sizes, file=path, source=tensor)
    tensors = {
        key: Entry(shape=known.shape, dtype=known.dtype, boxes=tuple(boxes[key].values()))
        for key, known in common.lead.snapshot.tensors.items()
    }
    return Contents(tensors=tensors, plain=plain)
