"""`harness size`."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from harness.commands.errors import DONE, told
from harness.commands.output import AsJson, console, print_json

_KINDS = {
    "full": "full attention: keys and values of each token",
    "sliding": "sliding window: keys and values of the last {window:,} tokens",
    "latent": "latent attention: one vector of {latent_dim} and a rotary key of {rope_dim} a token",
    "linear": "linear attention: {value_heads} matrices of {key_dim} x {value_dim}, whatever the length",
}


@told
def size(
    model: Annotated[
        str,
        Parameter(help="A name of `harness list models`, a YAML file, or a config.json or the folder that has one."),
    ],
    /,
    *,
    tokens: Annotated[int, Parameter(help="Length of a sequence, prompt and answer.")] = 8192,
    users: Annotated[int, Parameter(help="Sequences that are kept at once.")] = 1,
    as_json: AsJson = False,
) -> int:
    """Says how many bytes of KV cache a model keeps, by kind of layer.

    The bytes are those of the values. An engine allocates whole blocks, and keeps up to a block more a sequence.

    Example: harness size llama-3.1-70b --tokens 8192 --users 40
    """
    import msgspec
    from rich.table import Table

    from harness.errors import ConfigError
    from harness.experiment.units import format_bytes
    from simulator.models import DTYPE_BYTES, load_model

    for option, value in {"--tokens": tokens, "--users": users}.items():
        if value < 1:
            raise ConfigError(f"{option} {value}: must be at least 1")
    spec = load_model(model)
    width = DTYPE_BYTES[spec.dtype]
    groups: list[dict[str, Any]] = [
        {
            **msgspec.to_builtins(group),
            "bytes_per_token": group.token_values * width,
            "bytes": group.kept_bytes(tokens, width),
        }
        for group in spec.layer_groups
    ]
    whole = spec.kv_bytes(tokens)
    if as_json:
        told_of = {"model": spec.name, "dtype": spec.dtype, "tokens": tokens, "users": users, "groups": groups}
        print_json(told_of | {"bytes_per_sequence": whole, "bytes": users * whole})
        return DONE
    shown = Table(box=None, pad_edge=False)
    for title in ("layers", "KV of a token", f"KV of {tokens:,} tokens", ""):
        shown.add_column(title, justify="left" if not title else "right")
    for group in groups:
        each = format_bytes(group["bytes_per_token"]) if group["bytes_per_token"] else "none"
        shown.add_row(str(group["layers"]), each, format_bytes(group["bytes"]), _KINDS[group["kind"]].format(**group))
    console().print(shown)
    per_user = f"{format_bytes(whole)} a sequence of {tokens:,} tokens"
    print(f"{spec.name}, {spec.dtype}: {per_user}; {users:,} at once: {format_bytes(users * whole)}")
    return DONE
