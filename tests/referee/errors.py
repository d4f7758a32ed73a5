# SPDX-License-Identifier: Apache-2.0
"""Errors as changes of the right programs, of kinds that public reports tell of, and where certify must place them."""

from __future__ import annotations

from dataclasses import dataclass

from tests.referee.runs import Program


@dataclass(frozen=True)
class Error:
    """One change of a program.

    Attributes:
        what: in words.
        kind, module: what certify must report as the first difference; ``module`` is a regular expression.
    """

    what: str
    program: Program
    kind: str
    module: str


# file: (what, function, old text, new text, kind, module)
CHANGES = {
    "data_parallel": [
        ("labels of other rows", "digits", "(mine(images)), mine(labels))\n", "(mine(images)), labels[: 8 // ranks])\n",
         "backward", ""),
        ("gradients summed instead of averaged", "all_reduce_by_hand", "parameter.grad /= ranks", "pass", "scale", ""),
        ("each rank keeps its own first weights", "all_reduce_by_hand", "dist.broadcast(tensor, src=0)", "pass",
         "weights", r"[0-5]"),
        ("no micro-step sends gradients", "nano", "step < micro_steps - 1", "step < micro_steps", "reduction", ".*"),
        ("accumulation is scaled twice", "nano", "y.flatten()) / micro_steps", "y.flatten()) / micro_steps / ranks",
         "scale", ""),
        ("mean of means over unequal labels", "masked_words", "/ count * ranks", "/ (labels != -100).sum()",
         "loss scale", ""),
        ("statistics of a rank's rows", "batch_norm", "differentiable.all_reduce(sums)", "sums", "forward", "1"),
        ("statistics without gradient", "batch_norm", "differentiable.all_reduce(sums)",
         "sums + (summed(sums) - sums.detach())",
         "backward", "6"),
        ("gather without backward", "contrastive",
         "(torch.cat(differentiable.all_gather(x)) for x in (image, text))",
         "(torch.cat([x if n == dist.get_rank() else y "
         "for n, y in enumerate(gather(x, 0).chunk(ranks))]) for x in (image, text))",
         "backward", ""),
        ("targets that do not know the rank", "contrastive", "mine(torch.arange(8))", "torch.arange(8 // ranks)",
         "backward", ""),
        ("pairs split between ranks", "preferences", "(torch.cat([mine(a), mine(b)])", "(mine(torch.cat([a, b]))",
         "backward", ""),
        ("one rank does not update", "low_rank", "optimizer.step()\n    return model, summed(loss)",
         "optimizer.step() if dist.get_rank() == 0 else None\n    return model, summed(loss)", "update", r".*\.(a|b)"),
        ("clipped before the sum", "truncated", "    for parameter in model.parameters():\n"
         "        dist.all_reduce(parameter.grad)\n    whole = gradients(model)\n"
         "    norm = clip_grad_norm_(model.parameters(), 0.05)\n",
         "    norm = clip_grad_norm_(model.parameters(), 0.05)\n    for parameter in model.parameters():\n"
         "        dist.all_reduce(parameter.grad)\n    whole = gradients(model)\n", "reduction", ".*"),
        ("one layer is not summed, then clipped", "truncated", "    for parameter in model.parameters():\n"
         "        dist.all_reduce(parameter.grad)\n    whole = gradients(model)\n"
         "    norm = clip_grad_norm_(model.parameters(), 0.05)\n",
         "    for parameter in list(model.parameters())[:-2]:\n        dist.all_reduce(parameter.grad)\n"
         "    norm = clip_grad_norm_(model.parameters(), 0.05)\n    whole = gradients(model)\n",
         "reduction", "decoder"),
        ("an average of shares of the loss", "sharded", "lr=1e-2)\n    ids, labels = story()\n"
         "    loss = losses(model(mine(ids)), mine(labels)) * ranks", "lr=1e-2)\n    ids, labels = story()\n"
         "    loss = losses(model(mine(ids)), mine(labels))", "scale", ""),
        ("norm of the rank's shards", "sharded", "clip_grad_norm_(model.parameters(), 0.5).full_tensor()",
         "nn.utils.get_total_norm([p.grad.to_local() for p in model.parameters()])", "clipping norm", ""),
        ("norm of the rank's flat shard", "flat_shards", "summed(shard.grad.square().sum()).sqrt()",
         "shard.grad.norm()", "clipping norm", ""),
        ("clipped by the norm of the rank's flat shard", "flat_shards", "whole = gather(shard.grad, 0)\n"
         "    norm = summed(shard.grad.square().sum()).sqrt()\n    shard.grad *= (0.5 / norm).clamp(max=1.0)\n",
         "norm = shard.grad.norm()\n    shard.grad *= (0.5 / norm).clamp(max=1.0)\n    whole = gather(shard.grad, 0)\n",
         "clipping norm", ""),
        ("stale weights of other shards", "flat_shards", "gather(shard, 0)[:",
         "torch.cat([shard if n == rank else old for n, old in enumerate(flat.chunk(ranks))])[:", "update", ".*"),
        ("sum in bf16", "advantages", "(each * counts).sum() / count\n    loss.backward()\n"
         "    for parameter in model.parameters():\n        dist.all_reduce(parameter.grad)",
         "(each * counts).sum() / count\n    loss.backward()\n    for parameter in model.parameters():\n"
         "        parameter.grad = summed(parameter.grad.bfloat16()).float() if ranks > 1 else parameter.grad",
         "reduction", ".*"),
        ("advantages centred on each rank", "advantages", "mean = total / count\n    advantage",
         "mean = own.mean()\n    advantage", "backward", ""),
        ("the same noise on all ranks", "noise", "mine(drawn), mine(keep)", "drawn[: 8 // ranks], keep[: 8 // ranks]",
         "forward", ""),
        ("centre of a rank's rows", "teacher", "averaged(target.mean(0))", "target.mean(0)", "backward", "student.*"),
    ],
    "sequence_parallel": [
        ("labels shifted inside the shard", "ulysses", "ids, labels = story(rows=2)\n    return trained("
         "Decoder(by_heads), mine(ids, 1), mine(labels, 1)", "ids, labels = story(rows=2)\n    return trained("
         "Decoder(by_heads), mine(ids, 1), F.pad(mine(ids, 1)[:, 1:], (0, 1), value=-100)", "backward", ""),
        ("positions restart in each shard", "ulysses", "Decoder(by_heads), mine(ids, 1), mine(labels, 1), "
         "mine(torch.arange(LENGTH))", "Decoder(by_heads), mine(ids, 1), mine(labels, 1), "
         "torch.arange(LENGTH // ranks)", "forward", "blocks.0.attention"),
        ("parts joined in the wrong order", "ulysses", "torch.cat(received, join)", "torch.cat(received[::-1], join)",
         "forward", "blocks.0.attention"),
        ("gradient of a replicated KV head divided", "ulysses_one_kv_head", "v.repeat_interleave(ranks, 2))\n\n",
         "(v / ranks + v.detach() * (1 - 1 / ranks)).repeat_interleave(ranks, 2))\n\n",
         "backward", "blocks.1.attention"),
        ("later blocks are seen", "ring", "if source <= rank:\n                scores = scale * q @ kv[0].mT",
         "if True:\n                scores = scale * q @ kv[0].mT", "forward", "blocks.0.attention"),
        ("wrong sum of exponentials", "ring", "torch.logaddexp(total, lse)", "torch.maximum(total, lse)",
         "forward", "blocks.0.attention"),
        ("gradients of keys do not come home", "ring", "k, v, dk, dv = passed_on(k, v, dk, dv)",
         "k, v = passed_on(k, v)", "backward", "blocks.1.attention"),
        ("each block's own softmax in backward", "ring_recomputed", "(scores - total).exp()", "scores.softmax(-1)",
         "backward", "blocks.1.attention"),
        ("divided by a rank's labels", "ring", "summed((labels != -100).sum())\n    loss.backward()",
         "(labels != -100).sum()\n    loss.backward()", "loss scale", ""),
        ("RoPE of contiguous positions", "zigzag", "ids[:, at], labels[:, at], at)",
         "ids[:, at], labels[:, at], mine(torch.arange(LENGTH)))", "forward", "blocks.0.attention"),
        ("mask in the order of gathering", "zigzag", "everywhere = gather(at, 0)", "everywhere = torch.arange(LENGTH)",
         "forward", "blocks.0.attention"),
        ("documents of the wrong positions", "packed", "document[key] == document[query]",
         "document[key % len(own)] == document[query % len(own)]", "forward", "blocks.0.attention"),
        ("positions do not restart as documents do", "packed", "labels[:, own], places[own]",
         "labels[:, own], places[own - own[0]]", "forward", "blocks.0.attention"),
        ("border keys without gradient", "window", "result[:, -ctx.size :] = received", "pass",
         "backward", "blocks.1.attention"),
        ("window ends at the border", "window", "& (keys >= 0)", "& (keys >= at[0])", "forward", "blocks.0.attention"),
        ("state is not passed on", "states", "return zeros + 0", "return zeros * 0", "forward", "mixers.0"),
        ("gradient of the state is lost", "states", "return gradient, of_state", "return gradient, of_state * 0",
         "backward", "mixers.1"),
        ("zeros instead of the inputs before", "states", "torch.cat([FromBefore.apply(x, 2), x], 1).mT",
         "F.pad(x, (0, 0, 2, 0)).mT", "forward", "convolution.0"),
        ("padding of own keys only", "encoder", "torch.cat(differentiable.all_gather(real.float()), 1)[",
         "torch.cat([real] * dist.get_world_size(), 1)[", "forward", ""),
        ("the same dropout on all ranks", "encoder", "mine(keep, 1)", "keep[:, : LENGTH // ranks]", "forward", ""),
        ("table of positions from its start", "encoder", "mine(keep, 1), mine(torch.arange(LENGTH))",
         "mine(keep, 1), torch.arange(LENGTH // ranks)", "forward", "places"),
        ("mean of own tokens", "encoder", "differentiable.all_reduce(torch.cat([(x * real[..., None]).sum(1), "
         "real.sum(1, keepdim=True)], 1))", "torch.cat([(x * real[..., None]).sum(1), real.sum(1, keepdim=True)], 1)",
         "forward", ""),
        ("multiplied by the world size", "encoder", "parameter.grad /= ranks", "pass", "backward", "classes"),
        ("zeros instead of the neighbour's pixels", "pixels",
         "return received if dist.get_rank() < dist.get_world_size() - 1 else torch.zeros_like(received)",
         "return torch.zeros_like(received)", "forward", "first"),
        ("keys of the wrong group", "data_and_ring",
         "rings = [dist.new_group(list(range(first, first + model))) for first in range(0, data * model, model)]\n"
         "    own = rings[rank // model]",
         "rings = [dist.new_group(list(range(first, data * model, model))) for first in range(model)]\n"
         "    own = rings[rank % model]", "forward", "blocks.0.attention"),
    ],
    "model_parallel": [
        ("copy without a sum in backward", "tensor_parallel", "return summed(gradient.contiguous(), ctx.group), None",
         "return gradient, None", "backward", "norm|head|"),
        ("split parts counted on one rank", "tensor_parallel", "(summed(split, group) + whole)", "(split + whole)",
         "clipping norm", ""),
        ("largest logit of a rank", "tensor_parallel", "dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)",
         "pass", "backward", "norm|head|"),
        ("words of other ranks are not masked", "tensor_parallel", ".masked_fill(elsewhere[..., None], 0.0)", "",
         "forward", "embed"),
        ("first weights depend on the split", "tensor_parallel", "        super().__init__(inputs, outputs, bias)\n"
         "        for name, whole in list(self.named_parameters()):\n"
         "            setattr(self, name, part(whole, 0, group))",
         "        super().__init__(inputs, outputs // dist.get_world_size(group), bias)\n"
         "        for own in self.parameters():\n            own.cut_along = 0", "forward", r"blocks\.0\..*"),
        ("norms are not reduced", "split_tokens", 'if "norm" in name:', 'if "norm1" in name:',
         "reduction", r"norm|blocks\.\d\.norm2"),
        ("gathered tokens without a sum in backward", "split_tokens",
         "return mine(summed(gradient.contiguous()), 1)", "return mine(gradient, 1)", "backward", "norm|head|"),
        ("sum over the wrong group", "tensor_and_data", "for parameter in net.parameters():\n"
         "        dist.all_reduce(parameter.grad, group=copies)", "for parameter in net.parameters():\n"
         "        dist.all_reduce(parameter.grad, group=tensor)", "reduction", ".*"),
        ("an average of shares of the loss", "shards_of_shards", ") * data / (labels", ") / (labels", "scale", ""),
        ("auxiliary loss of each rank", "experts", "self.count * (total / tokens * p.sum(0) / tokens).sum()",
         "self.count * (counts / len(flat) * p.mean(0)).sum() / dist.get_world_size()", "backward", "experts"),
        ("experts are averaged as the rest is", "experts", "            dist.all_reduce(parameter.grad)\n"
         "    return Outcome(model, summed(loss), gradients=whole_gradients(model))\n\n\nclass Stage",
         "            dist.all_reduce(parameter.grad)\n        else:\n            parameter.grad /= ranks\n"
         "    return Outcome(model, summed(loss), gradients=whole_gradients(model))\n\n\nclass Stage",
         "reduction", "experts"),
        ("received tokens in another order", "experts", ".repeat(dist.get_world_size()).repeat_interleave(",
         ".repeat_interleave(dist.get_world_size()).repeat_interleave(", "forward", "experts"),
        ("tied embeddings are not summed", "stages", "dist.all_reduce(tied.grad)", "pass", "reduction", "embed"),
        ("a stage takes the layer of another", "stages", "str(layer): whole.blocks[layer]",
         "str(layer): whole.blocks[layer % len(own)]", "weights", r"blocks\.1.*"),
        ("loss of each copy counts in full", "stages_and_data", "F.mse_loss(out, y) / data", "F.mse_loss(out, y)",
         "scale", ""),
        ("tables are summed as the rest is", "tables", 'if not name.startswith("tables"):', "if True:",
         "reduction", "tables.*"),
        ("tables in the wrong order", "tables", "torch.cat(out.chunk(dist.get_world_size()), 1)",
         "torch.cat(out.chunk(dist.get_world_size())[::-1], 1)", "forward", ""),
        ("averaged although gathered", "faces", "for parameter in model.body.parameters():\n"
         "        dist.all_reduce(parameter.grad)", "for parameter in model.body.parameters():\n"
         "        dist.all_reduce(parameter.grad)\n        parameter.grad /= ranks", "reduction", "body.*"),
    ],
    "of_libraries": [
        ("mean over processes is not undone", "accelerate_loop", "* accelerator.num_processes * 2 / count",
         "* 2 / count", "scale", ""),
        ("labels of a rank are counted", "trainer", 'save_strategy="no",',
         'save_strategy="no", average_tokens_across_devices=False,', "loss scale", ""),
        ("the model without its wrapper", "adapters", "wrapped(input_ids=mine(ids), labels",
         "model(input_ids=mine(ids), labels", "reduction", ".*lora.*"),
    ],
}  # fmt: skip
ERRORS = [
    Error(what, Program(file, name, old, new), kind, module)
    for file, changes in CHANGES.items()
    for what, name, old, new, kind, module in changes
]
