"""Creates the notice that a prompt's KV has been transferred."""

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
    """Return the notice for a decode worker that has received the KV of a prompt.

    `skipped` is the number of leading pages that were not sent. Raises Internal if the task has no destination.
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
        next_draw=task.prior_output_tokens + 1,
        checksums=checksums,
        skipped=skipped,
    )
