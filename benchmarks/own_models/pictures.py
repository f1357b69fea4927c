"""Models of pictures, clips and pairs of pictures: segmentation, detection, matching, warping, super-resolution.

Shapes: b samples, c channels, h rows, w columns.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.own_models.parts import WIDTH, Around, Example, named

CLASSES = 10


def _normed(inside: int, outside: int, *, groups: int = 4, **settings: int) -> nn.Sequential:
    convolution = nn.Conv2d(inside, outside, 3, padding=settings.pop("padding", 1), **settings)
    return nn.Sequential(convolution, nn.GroupNorm(groups, outside), nn.SiLU())


def _labelled(body: nn.Module, batch: int, side: int = 16) -> Example:
    return Around(body), {"x": torch.randn(batch, 3, side, side), "target": torch.randint(CLASSES, (batch,))}


class _Recalibrated(nn.Module):
    """Channels weighed by their means and maxima, then places by those of the channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.channels = nn.Sequential(nn.Linear(width, width // 4), nn.ReLU(), nn.Linear(width // 4, width))
        self.places = nn.Conv2d(2, 1, 7, padding=3, padding_mode="reflect")

    def forward(self, x: Tensor) -> Tensor:
        weighed = self.channels(x.mean((2, 3))) + self.channels(x.amax((2, 3)))
        x = x * weighed.sigmoid()[:, :, None, None]
        found = torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True).values], 1)
        return x * self.places(found).sigmoid()


@named
def recalibrated(batch: int) -> Example:
    """Squeeze, excite and attention by places, over instance norm, PReLU and reflected borders."""
    body = nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, padding=1, padding_mode="reflect"),
        nn.InstanceNorm2d(WIDTH, affine=True),
        nn.PReLU(WIDTH),
        _Recalibrated(WIDTH),
        nn.ReflectionPad2d(1),
        nn.Conv2d(WIDTH, WIDTH, 3, groups=WIDTH),
        nn.LocalResponseNorm(5),
        _Recalibrated(WIDTH),
        nn.AdaptiveMaxPool2d(3),
        nn.Flatten(),
        nn.Linear(9 * WIDTH, CLASSES),
    )
    return _labelled(body, batch)


class _Pyramid(nn.Module):
    """Dilated convolutions beside a pooled picture, decoded with a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _normed(3, 16, stride=2)
        self.deep = _normed(16, WIDTH, stride=2)
        self.dilated = nn.ModuleList(_normed(WIDTH, 16, dilation=rate, padding=rate) for rate in (1, 2, 3))
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(WIDTH, 16, 1), nn.ReLU())
        self.bins = nn.ModuleList(nn.Sequential(nn.AdaptiveAvgPool2d(k), nn.Conv2d(WIDTH, 8, 1)) for k in (3, 5))
        self.joined = nn.Conv2d(5 * 16, WIDTH, 1)
        self.decode = _normed(WIDTH + 16, WIDTH)
        self.out = nn.Conv2d(WIDTH, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        early = self.stem(x)
        deep = self.deep(early)
        size = deep.shape[-2:]
        parts = [each(deep) for each in self.dilated]
        parts.append(F.interpolate(self.pooled(deep), size=size, mode="nearest"))
        parts += [F.interpolate(each(deep), size=size, mode="bilinear", align_corners=False) for each in self.bins]
        found = F.interpolate(self.joined(torch.cat(parts, 1)), scale_factor=2, mode="bilinear", align_corners=True)
        found = self.decode(torch.cat([found, early], 1))
        return F.interpolate(self.out(found), size=x.shape[-2:], mode="bicubic", align_corners=False)


@named
def atrous(batch: int) -> Example:
    """Dilated convolutions and pooled bins, resampled and joined; pixels without a label count for nothing."""
    target = torch.randint(CLASSES, (batch, 24, 24))
    target[:, :3] = 255

    def loss(found: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(found, target, ignore_index=255, label_smoothing=0.1)

    return Around(_Pyramid(), loss), {"x": torch.randn(batch, 3, 24, 24), "target": target}


class _Unpooled(nn.Module):
    """What max pooling dropped is put back where its maxima stood."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_normed(3, 16), _normed(16, WIDTH)])
        self.up = nn.ModuleList([_normed(WIDTH, 16), _normed(16, 16)])
        self.out = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        places = []
        for layer in self.down:
            x, place = F.max_pool2d(layer(x), 2, return_indices=True)
            places.append(place)
        for layer in self.up:
            x = layer(F.max_unpool2d(x, places.pop(), 2))
        return self.out(x)


@named
def unpooled(batch: int) -> Example:
    """Max pooling whose places are used again to unpool."""
    picture = torch.randn(batch, 3, 16, 16)
    return Around(_Unpooled(), F.smooth_l1_loss), {"x": picture, "target": picture.clone()}


class _Warped(nn.Module):
    """A picture turned by what is found in it, then classified."""

    def __init__(self) -> None:
        super().__init__()
        self.find = nn.Sequential(_normed(3, 16, stride=2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 6))
        nn.init.zeros_(self.find[-1].weight)
        self.find[-1].bias.data.copy_(torch.tensor([1.0, 0.1, 0.05, 0.0, 0.9, 0.1]))
        self.read = nn.Sequential(_normed(3, WIDTH, stride=2), nn.AvgPool2d(2), nn.Flatten(), nn.LazyLinear(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        grid = F.affine_grid(self.find(x).view(-1, 2, 3), list(x.shape), align_corners=False)
        return self.read(F.grid_sample(x, grid, padding_mode="border", align_corners=False))


@named
def warped(batch: int) -> Example:
    """A spatial transformer: an affine grid by the picture itself, sampled."""
    body = _Warped()
    with torch.no_grad():
        body(torch.zeros(1, 3, 16, 16))
    return _labelled(body, batch)


class _Flow(nn.Module):
    """Two pictures' features against each other in a window, and one warped onto the other."""

    def __init__(self, radius: int = 2) -> None:
        super().__init__()
        self.radius = radius
        self.features = nn.Sequential(_normed(3, 16, stride=2), _normed(16, 16))
        self.refine = nn.Sequential(_normed((2 * radius + 1) ** 2 + 16, WIDTH), nn.Conv2d(WIDTH, 2, 3, padding=1))

    def forward(self, first: Tensor, second: Tensor, flow: Tensor) -> Tensor:
        a, b = self.features(first), self.features(second)
        _, _, h, w = a.shape
        padded = F.pad(b, [self.radius] * 4)
        offsets = range(2 * self.radius + 1)
        volume = torch.stack([(a * padded[:, :, i : i + h, j : j + w]).mean(1) for i in offsets for j in offsets], 1)
        found = self.refine(torch.cat([F.leaky_relu(volume, 0.1), a], 1))
        rows, columns = torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="ij")
        grid = torch.stack([columns, rows], -1) + found.permute(0, 2, 3, 1) / torch.tensor([w / 2, h / 2])
        brought = F.grid_sample(b, grid, mode="bilinear", padding_mode="zeros", align_corners=True)
        return (found - flow).norm(dim=1).mean() + 0.1 * (brought - a).abs().mean()


@named
def optical_flow(batch: int) -> Example:
    """A cost volume of shifted features, and features warped by the flow that is found."""
    return _Flow(), {
        "first": torch.randn(batch, 3, 16, 16),
        "second": torch.randn(batch, 3, 16, 16),
        "flow": torch.randn(batch, 2, 8, 8),
    }


class _Capsules(nn.Module):
    """Votes of lower capsules, agreed on by routing."""

    def __init__(self, low: int = 32, rounds: int = 3) -> None:
        super().__init__()
        self.rounds = rounds
        self.stem = nn.Sequential(nn.Conv2d(3, WIDTH, 5, stride=4), nn.ReLU(), nn.Conv2d(WIDTH, WIDTH, 1))
        self.votes = nn.Parameter(torch.randn(1, low, CLASSES, 8, WIDTH * 9 // low) * 0.1)
        self.low = low

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        square = (x**2).sum(-1, keepdim=True)
        return square / (1 + square) * x / (square + 1e-8).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        low = self.squash(self.stem(x).reshape(len(x), self.low, 1, -1, 1))
        votes = (self.votes @ low).squeeze(-1)
        agreed = torch.zeros(votes.shape[:-1])
        for _ in range(self.rounds):
            found = self.squash((agreed.softmax(2).unsqueeze(-1) * votes).sum(1))
            agreed = agreed + (votes * found.unsqueeze(1)).sum(-1)
        return found.norm(dim=-1)


@named
def capsules(batch: int) -> Example:
    """Capsules with dynamic routing and a margin loss."""
    return Around(_Capsules(), F.multi_margin_loss), _labelled(nn.Identity(), batch)[1]


class _Anchored(nn.Module):
    """Boxes, their certainty and their class at every place of two scales: the head of a one-stage detector."""

    def __init__(self, anchors: int = 3) -> None:
        super().__init__()
        self.anchors = anchors
        self.fine = nn.Sequential(_normed(3, 16, stride=2), _normed(16, WIDTH, stride=2))
        self.coarse = _normed(WIDTH, WIDTH, stride=2)
        self.lateral = nn.Conv2d(WIDTH, WIDTH, 1)
        self.heads = nn.ModuleList(nn.Conv2d(WIDTH, anchors * (5 + CLASSES), 1) for _ in range(2))
        self.register_buffer("sizes", torch.rand(2, anchors, 2) + 0.5)

    def forward(self, x: Tensor, boxes: Tensor, labels: Tensor, holds: Tensor) -> dict[str, Tensor]:
        fine = self.fine(x)
        coarse = self.coarse(fine)
        fine = fine + F.interpolate(self.lateral(coarse), scale_factor=2.0, mode="nearest")
        found = []
        for level, (features, head) in enumerate(zip((fine, coarse), self.heads, strict=True)):
            b, _, h, w = features.shape
            raw = head(features).view(b, self.anchors, -1, h, w).permute(0, 1, 3, 4, 2)
            rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
            centre = raw[..., :2].sigmoid() + torch.stack([columns, rows], -1)
            size = raw[..., 2:4].clamp(max=4).exp() * self.sizes[level, :, None, None]
            found.append(torch.cat([centre, size, raw[..., 4:]], -1).flatten(1, 3))
        everything = torch.cat(found, 1)
        low = torch.maximum(everything[..., :2] - everything[..., 2:4] / 2, boxes[..., :2] - boxes[..., 2:] / 2)
        high = torch.minimum(everything[..., :2] + everything[..., 2:4] / 2, boxes[..., :2] + boxes[..., 2:] / 2)
        shared = (high - low).clamp(min=0).prod(-1)
        union = everything[..., 2:4].prod(-1) + boxes[..., 2:].prod(-1) - shared
        certain = everything[..., 4]
        p = certain.sigmoid()
        focal = F.binary_cross_entropy_with_logits(certain, holds, reduction="none") * (p - holds).abs() ** 2
        kinds = F.cross_entropy(everything[..., 5:].transpose(1, 2), labels, reduction="none")
        parts = {"overlap": ((1 - shared / union) * holds).mean(), "focal": focal.mean(), "kinds": kinds.mean()}
        return {"loss": parts["overlap"] + parts["focal"] + parts["kinds"], **parts}


@named
def detector(batch: int) -> Example:
    """A one-stage detector: anchors, overlaps of boxes, focal loss, its parts returned beside the loss."""
    places = 3 * (4 * 4 + 2 * 2)
    return _Anchored(), {
        "x": torch.randn(batch, 3, 16, 16),
        "boxes": torch.rand(batch, places, 4) + 0.5,
        "labels": torch.randint(CLASSES, (batch, places)),
        "holds": (torch.rand(batch, places) > 0.7).float(),
    }


class _RecurrentPlanes(nn.Module):
    """An LSTM whose products are convolutions, over the pictures of a clip."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.width = width
        self.gates = nn.Conv2d(3 + width, 4 * width, 3, padding=1)
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, clip: Tensor, target: Tensor) -> Tensor:
        b, t, _, h, w = clip.shape
        state = cell = clip.new_zeros(b, self.width, h, w)
        made = []
        for step in range(t):
            i, f, o, g = self.gates(torch.cat([clip[:, step], state], 1)).chunk(4, 1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            state = o.sigmoid() * cell.tanh()
            made.append(self.out(state))
        return F.l1_loss(torch.stack(made, 1), target)


@named
def recurrent_planes(batch: int) -> Example:
    """A convolutional LSTM that predicts the pictures of a clip."""
    return _RecurrentPlanes(), {"clip": torch.randn(batch, 4, 3, 8, 8), "target": torch.randn(batch, 4, 3, 8, 8)}


class _Windows(nn.Module):
    """Attention in windows, every other time in shifted ones, with a bias by relative places."""

    def __init__(self, width: int, heads: int = 4, window: int = 4, shift: int = 0, side: int = 8) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.norm, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU("tanh"), nn.Linear(2 * width, width))
        self.bias = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.02)
        at = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        apart = at[:, :, None] - at[:, None, :] + window - 1
        self.register_buffer("apart", apart[0] * (2 * window - 1) + apart[1], persistent=False)
        part = torch.zeros(1, side, side, 1)
        for i, rows in enumerate((slice(0, -window), slice(-window, -shift or None), slice(-shift, None))):
            for j, columns in enumerate((slice(0, -window), slice(-window, -shift or None), slice(-shift, None))):
                part[:, rows, columns] = 3.0 * i + j
        of = self.cut(part).squeeze(-1)
        mask = (of[:, None, :] != of[:, :, None]).float() * -100.0 if shift else None
        self.register_buffer("mask", mask)

    def cut(self, x: Tensor) -> Tensor:
        b, h, w, d = x.shape
        x = x.view(b, h // self.window, self.window, w // self.window, self.window, d)
        return x.transpose(2, 3).reshape(-1, self.window**2, d)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, d = x.shape
        y = torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2)) if self.shift else self.norm(x)
        y = self.cut(y)
        q, k, v = self.qkv(y).view(*y.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1) * (d // self.heads) ** -0.5
        scores = scores + self.bias[self.apart].permute(2, 0, 1)
        if self.mask is not None:
            n = self.mask.shape[0]
            scores = (scores.view(b, n, *scores.shape[1:]) + self.mask[None, :, None]).view(scores.shape)
        y = self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(y.shape))
        y = y.view(b, h // self.window, w // self.window, self.window, self.window, d).transpose(2, 3).reshape(x.shape)
        x = x + (torch.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y)
        return x + self.mlp(self.after(x))


class _Merged(nn.Module):
    """Windows on patches, four neighbours merged into one."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 2, 2)
        self.first = nn.Sequential(_Windows(width), _Windows(width, shift=2))
        self.merge = nn.Sequential(nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False))
        self.second = _Windows(2 * width, side=4)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.patches(x).permute(0, 2, 3, 1))
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        return self.head(self.second(self.merge(x)).mean((1, 2)))


@named
def shifted_windows(batch: int) -> Example:
    """Swin as its paper has it: windows rolled and masked, a table of biases, patches merged by strided slices."""
    return _labelled(_Merged(), batch)


class _Standardised(nn.Conv2d):
    """A convolution whose weight is standardised at every call."""

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), keepdim=True, unbiased=False)
        weight = (self.weight - mean) * torch.rsqrt(variance + 1e-5)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class _Blur(nn.Module):
    """A fixed blur by binomial weights, as anti-aliased pooling has it, and fixed edges."""

    def __init__(self, width: int) -> None:
        super().__init__()
        row = torch.tensor([1.0, 3.0, 3.0, 1.0])
        kernel = row[:, None] * row
        self.register_buffer("kernel", (kernel / kernel.sum()).expand(width, 1, 4, 4).clone())
        self.register_buffer("edges", torch.tensor([[[[1.0, 0, -1], [2, 0, -2], [1, 0, -1]]]]).repeat(width, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        blurred = F.conv2d(F.pad(x, (1, 2, 1, 2), mode="replicate"), self.kernel, stride=2, groups=x.shape[1])
        return blurred + 0.1 * F.conv2d(x, self.edges, stride=2, padding=1, groups=x.shape[1])


@named
def standardised(batch: int) -> Example:
    """Standardised weights, a fixed blur, channels shuffled, pixels unshuffled, MixStyle by shuffled statistics."""
    body = nn.Sequential(
        nn.PixelUnshuffle(2),
        _Standardised(12, WIDTH, 3, padding=1),
        nn.GroupNorm(8, WIDTH),
        nn.Mish(),
        _Blur(WIDTH),
        nn.ChannelShuffle(4),
        _Standardised(WIDTH, WIDTH, 3, padding=1, groups=4),
        nn.Hardswish(),
        nn.LPPool2d(2, 2),
        nn.Flatten(),
        nn.LayerNorm(4 * WIDTH, elementwise_affine=False),
        nn.Linear(4 * WIDTH, CLASSES),
    )
    return _labelled(body, batch)


class _Twins(nn.Module):
    """One body on three pictures: an anchor, one like it and one unlike it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(_normed(3, 16, stride=2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 16))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, anchor: Tensor, like: Tensor, unlike: Tensor) -> Tensor:
        a, p, n = (F.normalize(self.body(each), dim=-1) for each in (anchor, like, unlike))
        triplet = F.triplet_margin_loss(a, p, n, margin=0.5)
        cosine = F.cosine_embedding_loss(a, n, torch.full((len(a),), -1.0), margin=0.2)
        ranked = F.margin_ranking_loss((a * p).sum(-1), (a * n).sum(-1), torch.ones(len(a)), margin=0.1)
        return triplet + self.scale.exp() * cosine + ranked


@named
def twins(batch: int) -> Example:
    """Triplets through one body: margins, cosines, ranks."""
    return _Twins(), {name: torch.randn(batch, 3, 8, 8) for name in ("anchor", "like", "unlike")}


class _Bootstrap(nn.Module):
    """A student that predicts what a teacher without gradients makes of another view."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Flatten(), nn.Linear(192, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU())
        self.teacher = nn.Sequential(nn.Flatten(), nn.Linear(192, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU())
        self.teacher.requires_grad_(requires_grad=False)
        self.predict = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.register_buffer("centre", torch.zeros(1, WIDTH))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        total = torch.zeros(())
        for seen, other in ((first, second), (second, first)):
            with torch.no_grad():
                target = ((self.teacher(other) - self.centre) / 0.1).softmax(-1)
            found = (self.predict(self.student(seen)) / 0.2).log_softmax(-1)
            total = total - (target * found).sum(-1).mean()
        return total / 2


@named
def bootstrap(batch: int) -> Example:
    """Self-distillation: a frozen teacher, its targets centred, a student's prediction."""
    return _Bootstrap(), {"first": torch.randn(batch, 3, 8, 8), "second": torch.randn(batch, 3, 8, 8)}
