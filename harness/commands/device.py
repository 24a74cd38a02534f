"""`harness device`: reference devices by hand."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from harness.commands.errors import DONE, told
from harness.commands.options import Rate
from harness.commands.output import AsJson, print_json
from harness.errors import DeviceError


@told
def create_device(
    name: Annotated[str, Parameter(help="Lower-case letters, digits, - and _.")],
    /,
    *,
    bandwidth: Rate = None,
    read_bandwidth: Rate = None,
    write_bandwidth: Rate = None,
    iops: float | None = None,
    read_iops: float | None = None,
    write_iops: float | None = None,
    latency: Annotated[str | None, Parameter(help="Added to each request, e.g. 100us.")] = None,
    file_system: Annotated[str | None, Parameter(help="ext4 (default), xfs or btrfs.")] = None,
    size: Annotated[str | None, Parameter(help="Default: 4GiB.")] = None,
    backing: Annotated[str | None, Parameter(help="A folder for the file with the bytes. Default: RAM.")] = None,
) -> int:
    """Makes a device with the limits given, and a file system on it.

    It stays, mounted, until it is destroyed.

    Example: harness device create ssd --bandwidth 400MiB/s --file-system xfs
    """
    settings = {key: value for key, value in locals().items() if key != "name" and value is not None}
    from pydantic import ValidationError

    from harness.blockio.devices import create
    from harness.experiment.storage import DeviceSettings
    from harness.experiment.units import format_bytes

    try:
        spec = DeviceSettings.model_validate(settings)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        option = "".join(f"--{str(part).replace('_', '-')}: " for part in first["loc"])
        raise DeviceError(f"{option}{first.get('ctx', {}).get('error', first['msg'])}") from None
    device = create(name, spec)
    print(f"{device.mount}  {device.file_system} on {device.loop}, {format_bytes(device.size_bytes)}")
    return DONE


@told
def list_devices(*, as_json: AsJson = False) -> int:
    """Lists the devices that are there, runs' included."""
    import msgspec

    from harness.blockio.devices import devices
    from harness.experiment.units import format_bytes

    found = list(devices())
    if as_json:
        print_json([msgspec.structs.asdict(device) | {"mount": str(device.mount)} for device in found])
        return DONE
    for device in found:
        limits = ", ".join(f"{key} {value:g}" for key, value in device.limits.items() if value)
        state = device.loop or "broken: destroy it"
        print(f"{device.name:24} {device.file_system:6} {format_bytes(device.size_bytes):>8}  {state}  {limits}")
        print(f"{'':24} {device.mount}")
    return DONE


@told
def destroy_devices(
    name: Annotated[str | None, Parameter(help="As `harness device list` says.")] = None,
    /,
    *,
    everything: Annotated[bool, Parameter(name="--all", help="All of them, also what a crash left.")] = False,
) -> int:
    """Unmounts and removes a device.

    It touches nothing that `harness device` or a run did not make.

    Example: harness device destroy ssd
    """
    from harness.blockio.devices import destroy, left

    if (name is None) == (not everything):
        raise DeviceError("name one device, or say --all")
    refused = []
    for each in left() if name is None else [name]:
        try:
            destroy(each)
            print(f"{each}: removed")
        except DeviceError as error:
            refused.append(error)
    if refused:
        raise refused[0]
    return DONE
