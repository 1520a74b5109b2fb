"""The notice of a prompt whose KV has arrived."""

from prefill_worker.request import PrefillRequest
from tandem.protocol.errors import Internal
from tandem.protocol.messages import PageChecksum, PeerRef, TransferNotice


def make_notice(
    request: PrefillRequest,
    me: PeerRef,
    first_token_id: int,
    *,
    token_hash: bytes,
    skipped: int,
    checksums: tuple[PageChecksum, ...] = (),
) -> TransferNotice:
    """The notice that tells a decode worker of a prompt whose KV it has.

    The prompt's first `skipped` pages were there already.
    """
    task = request.task
    if task.destination is None:
        raise Internal(f"{task.ref.request_id} has no lease to be handed over under")
    return TransferNotice(
        lease=task.destination.lease,
        prefill=me,
        token_hash=token_hash,
        pages=request.pages_needed,
        first_token_id=first_token_id,
        next_draw=task.answered + 1,
        checksums=checksums,
        skipped=skipped,
    )
