"""Marks each token's slot with its position and its prompt's first token, and finds the marks of every prefix.

A prefix that came back from CPU RAM or storage so is what was written, in the right slots. The first and the last layer
are looked at, which are copied first and last.
"""

from __future__ import annotations

from typing import Any

import torch
from kv_accelerator.sglang.models.paced import SglangPacedForCausalLM as Paced
from sglang.srt.model_executor.forward_context import get_attn_backend


class SglangPacedForCausalLM(Paced):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any, **kwargs: Any) -> Any:
        answer = super().forward(input_ids, positions, batch, **kwargs)
        backend, count = get_attn_backend(), batch.batch_size
        rows = backend.req_to_token_pool.req_to_token[batch.req_pool_indices[:count]].long()
        lengths = batch.seq_lens[:count].tolist()
        new = batch.extend_seq_lens[:count].tolist() if batch.forward_mode.is_extend() else [1] * count
        for buffer in (backend.token_to_kv_pool.k_buffer[0], backend.token_to_kv_pool.v_buffer[-1]):
            marks, at = buffer.view(torch.int16)[:, 0, :2], 0
            for slots, length, q in zip(rows, lengths, new, strict=True):
                _check_and_mark(marks, slots[:length], length - q, input_ids[at].short())
                at += q
        return answer


def _check_and_mark(marks: torch.Tensor, slots: torch.Tensor, context: int, token: torch.Tensor) -> None:
    old, fresh = slots[:context], slots[context:]
    first = marks[old[0], 1].clone() if context else token
    in_place = torch.equal(marks[old, 0], torch.arange(context).short()) and bool((marks[old, 1] == first).all())
    if not in_place:
        raise RuntimeError(f"the KV of a prefix of {context} tokens is not what was written")
    marks[fresh, 0] = torch.arange(context, len(slots)).short()
    marks[fresh, 1] = first


EntryClass = SglangPacedForCausalLM
