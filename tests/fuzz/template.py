# ruff: noqa: PT017, B905, E731, F401, F811, F821, F841, I001
# The text of a case's program, read and never imported. `program` puts in what is the case's own after `# here:`, and
# leaves out each line, with what is indented below it, whose `# if:` names what the case has not (or, with !, has).
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint  # if: checkpointed

import penstock
from contextlib import nullcontext  # if: units
from penstock.model.part import WHOLE_MODEL  # if: units
from penstock.runtime.state.randomness import unit_stream  # if: units
from functools import partial  # if: unbuffered
from penstock.runtime.transport import ThreadTransport  # if: unbuffered

# here: constants
EXTRA, PIPED, ARMED = [], False, False


def report(value):  # if: extra
    penstock.add_loss("extra", value) if PIPED else EXTRA.append(value)


def armed(where):  # if: fault
    return ARMED and (where, penstock.current_microbatch()) == (FAULT[2], FAULT[3])


# here: classes


def make():
    torch.manual_seed(SEED)
    # here: layers
    return model.to(DTYPE)


def batch(step, replica=0):
    """The input of a step, one beside it, and the target."""
    torch.manual_seed(1000 + SEED + 10 * step + replica)
    rows = sum(SIZES)
    x = torch.randint(0, 10, (rows, 2))  # if: table
    x = torch.randn(rows, WIDTH).to(DTYPE)  # if: !table !columns
    x = torch.randn(WIDTH, rows).to(DTYPE).t()  # if: columns
    x = F.pad(x.flatten(), (3, 0))[3:].view(rows, WIDTH)  # if: offset
    side = None  # if: !rows
    side = (1 + torch.rand(rows)).to(DTYPE)  # if: rows
    y = torch.randn(rows, WIDTH).to(DTYPE)  # if: !own
    y = (y, rows_that_count(step, rows))  # if: changing
    y = None  # if: own
    y = (y, (0.1 + torch.rand(rows)).to(DTYPE))  # if: weighted
    y = torch.randint(0, WIDTH, (rows,)).masked_fill(torch.rand(rows) < 0.4, -100)  # if: classes
    y[[sum(SIZES[:number]) for number in range(len(SIZES))]] = 1  # if: classes
    return x, side, y


def pieces(value):
    if isinstance(value, tuple):
        return list(zip(*map(pieces, value)))
    return [None] * len(SIZES) if value is None else list(value.split(SIZES))


def rows_that_count(step, rows):  # if: changing
    """All of them, until the loss changes with the last step."""
    mask = torch.rand(rows) < 0.5
    mask[[sum(SIZES[:number]) for number in range(len(SIZES))]] = True
    return mask.to(DTYPE)  # if: switched
    return (mask if step == STEPS - 1 else mask | True).to(DTYPE)  # if: !switched


def scale(step):  # if: kwargs
    return (1 + torch.rand(sum(SIZES), generator=torch.Generator().manual_seed(step))).to(DTYPE)


def loss_fn(output, target):  # if: mse
    return F.mse_loss(output, target)


def loss_fn(output, target):  # if: masked
    return ((output - target[0]).square().mean(1) * target[1]).sum() / target[1].sum()


def loss_fn(output, target):  # if: selected
    return (output - target[0]).square().mean(1)[target[1] > 0].mean()


def loss_fn(output, target):  # if: switched
    each = (output - target[0]).square().mean(1)
    return (each * target[1]).sum() / target[1].sum() if loss_fn.on else each.mean()


loss_fn.on = False  # if: switched


def loss_at(step):  # if: exchanged
    return (lambda output, target: F.mse_loss(output, target), nn.MSELoss(reduction="sum"))[(step + SEED) % 2]


def loss_fn(output, target):  # if: sum
    return F.mse_loss(output, target, reduction="sum")


def loss_fn(output, target):  # if: weighted
    return ((output - target[0]).square().mean(1) * target[1]).sum() / target[1].sum()


def loss_fn(output, target):  # if: cross
    return F.cross_entropy(output, target, ignore_index=-100)


loss_fn = nn.CrossEntropyLoss(torch.linspace(0.5, 1.5, WIDTH).to(DTYPE))  # if: known


def loss_fn(output, target, scale):  # if: kwargs
    return ((output - target).square().mean(1) * scale).mean()


def weigh(target):  # if: weighted
    return target[1].sum().item()


def weigh(target):  # if: changing
    return len(target[1]) if not loss_fn.on else target[1].sum().item()  # if: switched
    return target[1].sum().item()  # if: !switched


def weigh(target):  # if: cross
    return (target != -100).sum().item()


def weigh(target):  # if: known
    return loss_fn.weight[target[target != -100]].sum().item()


def shares_of(*targets, step=0):
    """What each microbatch's loss counts; of several replicas, one list for each."""
    weights = [SIZES for _ in targets]  # if: !weighted !classes !changing
    weights = [[weigh(target) for target in pieces(whole)] for whole in targets]  # if: changing
    if isinstance(loss_at(step), nn.Module):  # if: exchanged
        return [[1.0 for _ in row] for row in weights]
    weights = [[weigh(target) for target in pieces(whole)] for whole in targets]  # if: weighted
    weights = [[weigh(target) for target in pieces(whole)] for whole in targets]  # if: classes
    return [[weight / sum(map(sum, weights)) for weight in row] for row in weights]  # if: !sum
    return [[1.0 for _ in row] for row in weights]  # if: sum


def forward(model, x, side, step, number):  # if: staged
    """One microbatch through the stages, with the pipeline's random numbers and skips."""
    layers = list(model)  # if: sequential
    model = [nn.Sequential(*layers[sum(BALANCE[:n]) :][:count]) for n, count in enumerate(BALANCE)]  # if: sequential
    for stage, module in enumerate(model):
        given = x if isinstance(x, tuple) else (x,)  # if: list
        given = (x,)  # if: sequential
        given += (skipped,) if stage == SKIP[1] else ()  # if: skip
        named = {"side": side} if stage in SIDE_AT else {}  # if: side
        named = {}  # if: !side
        with penstock.randomness(7, step, number, stage):
            x = module(*given, **named)
        if isinstance(x, penstock.Routed):  # if: skip
            x, skipped = x.output, x.to[SKIP[1]].clone()  # of several readers each gets what was sent
    return x


def drawing(number, layer, x):  # if: units
    """A layer's call; in the plain loop with the random numbers that it has in the pipeline."""
    with nullcontext() if PIPED else unit_stream(number):
        return layer(x)


def forward(model, x, side, step, number):  # if: whole
    with penstock.randomness(7, step, number, WHOLE_MODEL):  # if: units
        return model(x)  # if: !side
        return model(x, side=side)  # if: side
    return model(x)  # if: !side !units
    return model(x, side=side)  # if: side !units


def losses_of(model, step, replica=0, microbatches=0, trained=True):
    """The loss and the output of each microbatch, and its losses from inside stages."""
    scales = pieces(scale(step))  # if: kwargs
    for number, (x, side, y) in enumerate(zip(*map(pieces, batch(step, replica)))):
        EXTRA.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=PRECISION):
            output = loss = forward(model, x, side, step, replica * len(SIZES) + number)
            loss = loss_fn(output, y)  # if: !own !kwargs !exchanged
            loss = loss_at(step)(output, y)  # if: exchanged
            loss = loss_fn(output, y, scales[number])  # if: kwargs
        yield loss, output.detach().clone(), list(EXTRA)  # a layer may write to its memory again


def add_gradients(roots, model):
    """As backward() does, but never into memory that parameters share: x + a[None] + b[None] has such."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter, gradient in zip(wanted, torch.autograd.grad(roots, wanted, allow_unused=True)):
        if gradient is not None:
            parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient


def keep(found, step, parameters, buffers, modules=()):
    """What a step leaves behind."""
    for name, parameter in parameters:
        whole = lambda tensor: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()
        gradient = None if parameter.grad is None else whole(parameter.grad)
        found |= {f"step {step}: {name}": whole(parameter.detach()), f"step {step}: gradient of {name}": gradient}
    for name, buffer in buffers:
        found[f"step {step}: buffer {name}"] = buffer.detach().clone()
    for name, module in modules:  # if: attributes
        if hasattr(module, "calls"):
            found[f"step {step}: attributes of {name}"] = torch.tensor([module.calls, len(module.log)])
        if hasattr(module, "seen"):
            found[f"step {step}: attributes of {name}"] = module.seen.clone()


def updating(parameters):  # if: inside
    """A function that updates one of the parameters, and clears its gradient."""
    optimizers = {each: torch.optim.OPTIMIZER([each], **SETTINGS) for each in parameters}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad(set_to_none=TO_NONE)

    return update


def plain():
    """Gradient accumulation, microbatch by microbatch."""
    models, found = [make() for _ in range(REPLICAS)], {}
    found["layers that are in one piece with others"] = torch.tensor(0)  # if: owners
    optimizers = [torch.optim.OPTIMIZER(model.parameters(), **SETTINGS) for model in models]  # if: optimizer
    update = updating(models[0].parameters())  # if: inside
    for step in range(STEPS):
        loss_fn.on = step == STEPS - 1  # if: switched
        shares = shares_of(*(batch(step, replica)[2] for replica in range(REPLICAS)), step=step)
        totals, before = [], [parameter.grad for parameter in models[0].parameters()]
        for replica, model in enumerate(models):
            model.zero_grad()  # if: replicas
            total, outputs = 0.0, []
            for number, (loss, output, extra) in enumerate(losses_of(model, step, replica)):
                add_gradients(
                    [loss * shares[replica][number], *(value / REPLICAS / len(SIZES) for value in extra)], model
                )
                total = total + loss.detach() * shares[replica][number]
                outputs.append(output)
                found[f"step {step}: loss {number}"] = loss.detach()  # if: alone
            found[f"step {step}: output"] = torch.cat(outputs)  # if: alone !own
            totals.append(total)
        found[f"step {step}: loss"] = sum(totals[1:], totals[0])
        for old, *copies in zip(before, *(model.parameters() for model in models)):  # if: replicas
            terms = [term for term in (old, *(copy.grad for copy in copies)) if term is not None]
            for copy in copies:
                copy.grad = sum(terms[1:], terms[0]) if terms else None
        for old, parameter in zip(before, models[0].parameters()):  # if: inside
            update(parameter) if parameter.grad is not old else None
        for replica, model in enumerate(models):
            buffers = model.named_buffers()  # if: alone
            buffers = ((f"{n} of replica {replica}", b) for n, b in model.named_buffers())  # if: replicas
            keep(found, step, model.named_parameters(), buffers, model.named_modules())
        for replica, model in enumerate(models):  # if: evaluate
            with torch.no_grad():
                losses, predicted, _ = zip(*losses_of(model.eval(), step))
            found[f"step {step}: predicted by replica {replica}"] = torch.cat([each.reshape(-1) for each in predicted])
            parts = [loss * share for loss, share in zip(losses, shares[0])]
            found[f"step {step}: evaluated"] = sum(parts[1:], parts[0])  # if: alone
            model.train()
        for optimizer, model in zip(optimizers, models) if step % EVERY == EVERY - 1 else ():  # if: optimizer !inside
            found[f"step {step}: norm"] = nn.utils.clip_grad_norm_(model.parameters(), CLIP)  # if: clip
            optimizer.step()
            optimizer.zero_grad(set_to_none=TO_NONE)
    return found


def given(step, replica=0):
    """The batch as step() takes it."""
    x, side, y = batch(step, replica)
    x, side, y = [None if v is None else penstock.Microbatches(pieces(v)) for v in (x, side, y)]  # if: microbatches
    more = {"target": y}  # if: !own
    more = {}  # if: own
    more["loss_kwargs"] = {"scale": scale(step)}  # if: kwargs !microbatches
    more["loss_kwargs"] = {"scale": penstock.Microbatches(pieces(scale(step)))}  # if: kwargs microbatches
    return (x,), {"side": side}, more  # if: side staged
    return (x,), {}, more  # if: !side staged
    return (), {"x": x, "side": side}, more  # if: side whole
    return (), {"x": x}, more  # if: !side whole


def piped():
    global ARMED, PIPED
    PIPED, replica = True, 0
    model, found = make(), {}
    mesh = penstock.mesh(pp=-1, dp=REPLICAS)  # if: replicas
    replica = mesh.get_local_rank("dp")  # if: replicas
    pipe = penstock.Pipeline(
        # here: options
    )
    loss_fn.on = False  # if: switched
    cuts = sum(pipe.deployment.staged.balance)  # if: owners
    found["layers that are in one piece with others"] = torch.tensor(max(0, OWNERS - cuts))  # if: owners
    with pipe:
        optimizer = torch.optim.OPTIMIZER(pipe.parameters(), **SETTINGS)  # if: optimizer !inside
        update = updating(pipe.parameters())  # if: inside
        for parameter in pipe.parameters():  # if: inside
            parameter.register_post_accumulate_grad_hook(update) if parameter.requires_grad else None
        for step in range(STEPS):
            pipe.loss_fn = loss_at(step)  # if: exchanged
            loss_fn.on = step == STEPS - 1  # if: switched
            if step == FAULT[0]:  # if: fault
                ARMED, (args, kwargs, more) = True, given(step, replica)
                try:
                    pipe.step(*args, **kwargs, **more)
                except penstock.errors.PeerFailure as failure:
                    if "the trap was sprung" not in str(failure):
                        raise
                else:
                    raise AssertionError("the trap was not sprung")
                ARMED = False
            args, kwargs, more = given(step, replica)
            result = pipe.step(*args, **kwargs, **more, outputs=OUTPUTS)  # if: !changing
            try:  # if: changing
                result = pipe.step(*args, **kwargs, **more, outputs=OUTPUTS)
            except penstock.errors.PeerFailure as failure:  # if: changing
                assert step == STEPS - 1 or "losses" not in str(failure), f"a right loss was refused: {failure}"
                raise
            found[f"step {step}: loss"] = result.loss
            for number, loss in enumerate(result.losses):  # if: alone
                found[f"step {step}: loss {number}"] = loss
            if result.output is not None:  # if: alone !own
                found[f"step {step}: output"] = result.output
            buffers = pipe.named_buffers()  # if: alone
            buffers = ((f"{n} of replica {replica}", b) for n, b in pipe.named_buffers())  # if: replicas
            keep(found, step, pipe.named_parameters(), buffers, model.named_modules())  # if: threads
            keep(found, step, pipe.named_parameters(), buffers)  # if: !threads
            args, kwargs, more = given(step)  # if: evaluate
            found[f"step {step}: evaluated"] = pipe.evaluate(*args, **kwargs, **more).loss  # if: evaluate alone
            predicted = pipe.predict(*args, **kwargs)  # if: evaluate !own
            predicted = torch.stack(list(pipe.evaluate(*args, **kwargs).losses))  # if: evaluate own
            if predicted is not None:  # if: evaluate
                found[f"step {step}: predicted by replica {replica}"] = predicted.reshape(-1)
            if step % EVERY == EVERY - 1:  # if: optimizer !inside
                found[f"step {step}: norm"] = pipe.clip_grad_norm_(CLIP)  # if: clip
                optimizer.step()
                optimizer.zero_grad(set_to_none=TO_NONE)
    return found


def differences(want, have):
    for name, tensor in have.items():
        wanted = want.get(name)
        if name not in want or (wanted is None) != (tensor is None):
            yield name, f"plain: {wanted}, pipeline: {tensor}"
        elif wanted is not None and (wanted.shape, wanted.dtype) != (tensor.shape, tensor.dtype):
            yield name, f"plain: {wanted.dtype} {wanted.shape}, pipeline: {tensor.dtype} {tensor.shape}"
        elif wanted is not None and wanted.numel():
            largest = max(wanted.abs().max().item(), 1e-3)  # what should be 0 is rounding, such as a bias before a norm
            far = (wanted.double() - tensor.double()).abs().max().item()
            if not far <= TOLERANCE * largest:
                yield name, f"off by {far / largest:.2g} of the largest number"


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")  # if: !threads
    ThreadTransport.group = partial(ThreadTransport.group, capacity=0)  # if: unbuffered
    found = list(differences(plain(), piped()))
    for name, text in found:
        print(f"{name}: {text}")
    print(f"{len(found)} differences")
