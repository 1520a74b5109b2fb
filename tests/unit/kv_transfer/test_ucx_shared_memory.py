"""The transports that UCX is given, and refusals of a user's own."""

import pytest

from kv_transfer.nixl_backend.ucx_shared_memory import TRANSPORTS, check_transports, ucx_settings
from tandem.protocol.errors import InvalidArgument


@pytest.mark.parametrize("chosen", ["tcp", "rc,cuda_copy", "all", "^tcp", "sm,self,tcp", ""])
def test_what_listens_to_a_network_is_refused(chosen: str) -> None:
    with pytest.raises(InvalidArgument, match="--trusted-network") as refusal:
        check_transports({"UCX_TLS": chosen}, trusted_network=False)
    assert refusal.value.message.startswith("UCX_TLS")
    check_transports({"UCX_TLS": chosen}, trusted_network=True)


@pytest.mark.parametrize("chosen", [TRANSPORTS, "posix,self", "sm,cuda_ipc,cuda_copy"])
def test_what_stays_on_the_host_is_not(chosen: str) -> None:
    check_transports({"UCX_TLS": chosen}, trusted_network=False)
    check_transports({}, trusted_network=False)


def test_pages_on_gpus_have_transports_too() -> None:
    """CUDA transports are included; UCX ignores them where there is no GPU."""
    assert "cuda" in ucx_settings(trusted_network=False)["UCX_TLS"].split(",")
    assert ucx_settings(trusted_network=True) == {}, "on a trusted network UCX takes the best that it finds"
