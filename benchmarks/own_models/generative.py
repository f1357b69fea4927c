"""Generative models of the user's own: autoencoders, flows, adversaries, fields, operators on spectra."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.own_models.parts import LAYERS, WIDTH, Around, Example, named


class _Variational(nn.Module):
    """Mean and variance of a code, noise from outside, the evidence bound as two means."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(64, 16), nn.Linear(64, 16)
        self.decoder = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 192), nn.Sigmoid())

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x)
        mean, log_variance = self.mean(h), self.log_variance(h)
        made = self.decoder(mean + noise * torch.exp(0.5 * log_variance)).view(x.shape)
        apart = F.binary_cross_entropy(made, x, reduction="sum")
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        return (apart + divergence) / x.size(0), made, mean


@named
def vae(batch: int) -> Example:
    """A variational autoencoder that returns a tuple; sums over samples divided by their number."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = _Variational()

        def forward(self, x: Tensor, noise: Tensor) -> Tensor:
            return self.body(x, noise)[0]

    return First(), {"x": torch.rand(batch, 3, 8, 8), "noise": torch.randn(batch, 16)}


class _Coupling(nn.Module):
    """Half of the features moves and scales the other half; a fixed permutation follows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width // 2, 64), nn.Tanh(), nn.Linear(64, width))
        self.log_scale, self.shift = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("order", torch.randperm(width))

    def forward(self, x: Tensor, log_det: Tensor) -> tuple[Tensor, Tensor]:
        x = (x + self.shift) * self.log_scale.exp()
        first, second = x[:, self.order].chunk(2, dim=1)
        scale, shift = self.net(first).chunk(2, dim=1)
        scale = torch.tanh(scale)
        second = second * torch.exp(scale) + shift
        return torch.cat([first, second], 1), log_det + scale.sum(1) + self.log_scale.sum()


@named
def flow(batch: int) -> Example:
    """A normalising flow of affine couplings (RealNVP): log-determinants that start as zeros of the batch."""

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(_Coupling(16) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            log_det = torch.zeros(x.shape[0])
            for layer in self.layers:
                x, log_det = layer(x, log_det)
            log_likelihood = -0.5 * (x**2 + math.log(2 * math.pi)).sum(1)
            return -(log_likelihood + log_det).mean()

    return Flow(), {"x": torch.randn(batch, 16)}


def _up(width: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.ConvTranspose2d(width, out, 4, 2, 1, bias=False), nn.GroupNorm(4, out), nn.ReLU(True))


@named
def generator(batch: int) -> Example:
    """The generator's step of a GAN (DCGAN): a frozen discriminator with spectral norm judges it."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = nn.Sequential(
                nn.Unflatten(1, (16, 1, 1)), _up(16, 32), _up(32, 16), nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh()
            )
            norm = nn.utils.parametrizations.spectral_norm
            self.discriminator = nn.Sequential(
                norm(nn.Conv2d(3, 16, 4, 2, 1)), nn.LeakyReLU(0.2, True), norm(nn.Conv2d(16, 1, 4)), nn.Flatten(0)
            ).requires_grad_(False)

        def forward(self, noise: Tensor) -> Tensor:
            return F.softplus(-self.discriminator(self.generator(noise))).mean()

    return Step(), {"noise": torch.randn(batch, 16)}


@named
def discriminator(batch: int) -> Example:
    """The discriminator's step: real and made images in one batch, taken apart again."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 2, 1), nn.LeakyReLU(0.2),
                nn.Flatten(), nn.Linear(128, 1),
            )  # fmt: skip

        def forward(self, real: Tensor, made: Tensor) -> Tensor:
            scores = self.body(torch.cat([real, made.detach()], 0))
            good, bad = scores.chunk(2, dim=0)
            return F.softplus(-good).mean() + F.softplus(bad).mean()

    return Step(), {"real": torch.randn(batch, 3, 8, 8), "made": torch.randn(batch, 3, 8, 8)}


@named
def radiance(batch: int) -> Example:
    """A radiance field: sines of positions, samples along rays, transmittance by cumprod (NeRF)."""

    class Field(nn.Module):
        def __init__(self, bands: int = 4) -> None:
            super().__init__()
            self.register_buffer("bands", 2.0 ** torch.arange(bands))
            self.trunk = nn.ModuleList(nn.Linear(64 if i else 6 * bands + 3, 64) for i in range(4))
            self.density, self.colour = nn.Linear(64, 1), nn.Linear(67, 3)

        def forward(self, origin: Tensor, direction: Tensor, target: Tensor) -> Tensor:
            depth = torch.linspace(0.5, 2.0, 9)
            points = origin[:, None] + direction[:, None] * depth[:-1, None]
            angles = (points[..., None, :] * self.bands[:, None]).flatten(-2)
            h = torch.cat([points, angles.sin(), angles.cos()], -1)
            for layer in self.trunk:
                h = F.relu(layer(h))
            opacity = 1 - torch.exp(-F.softplus(self.density(h)[..., 0]) * (depth[1:] - depth[:-1]))
            passed = torch.cumprod(torch.cat([torch.ones_like(opacity[:, :1]), 1 - opacity + 1e-10], 1), 1)[:, :-1]
            seen = direction[:, None].expand(-1, 8, -1)
            colour = self.colour(torch.cat([h, seen], -1)).sigmoid()
            return F.mse_loss(((opacity * passed)[..., None] * colour).sum(1), target)

    rays = {"origin": torch.randn(batch, 3), "direction": F.normalize(torch.randn(batch, 3), dim=1)}
    return Field(), {**rays, "target": torch.rand(batch, 3)}


class _Spectral(nn.Module):
    """Weights of complex numbers on the lowest frequencies."""

    def __init__(self, width: int, modes: int = 3) -> None:
        super().__init__()
        self.modes = modes
        self.low = nn.Parameter(torch.randn(width, width, modes, modes, dtype=torch.cfloat) / width)
        self.high = nn.Parameter(torch.randn(width, width, modes, modes, dtype=torch.cfloat) / width)

    def forward(self, x: Tensor) -> Tensor:
        m, found = self.modes, torch.fft.rfft2(x)
        out = torch.zeros(*found.shape, dtype=torch.cfloat, device=x.device)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", found[:, :, :m, :m], self.low)
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", found[:, :, -m:, :m], self.high)
        return torch.fft.irfft2(out, s=x.shape[-2:])


@named
def neural_operator(batch: int) -> Example:
    """A Fourier neural operator: complex parameters, real Fourier transforms, parts written."""

    class Operator(nn.Module):
        def __init__(self, width: int = 16) -> None:
            super().__init__()
            self.lift = nn.Linear(3, width)
            self.spectral = nn.ModuleList(_Spectral(width) for _ in range(4))
            self.local = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(4))
            self.last = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, 1))

        def forward(self, x: Tensor) -> Tensor:
            b, h, w, _ = x.shape
            rows = torch.linspace(0, 1, h).reshape(1, h, 1, 1).repeat(b, 1, w, 1)
            columns = torch.linspace(0, 1, w).reshape(1, 1, w, 1).repeat(b, h, 1, 1)
            x = self.lift(torch.cat([x, rows, columns], -1)).permute(0, 3, 1, 2)
            for spectral, local in zip(self.spectral, self.local, strict=True):
                x = F.gelu(spectral(x) + local(x))
            return self.last(x.permute(0, 2, 3, 1))

    def relative(made: Tensor, target: Tensor) -> Tensor:
        apart = torch.norm((made - target).flatten(1), dim=1) / torch.norm(target.flatten(1), dim=1)
        return apart.mean()

    return Around(Operator(), relative), {"x": torch.randn(batch, 8, 8, 1), "target": torch.randn(batch, 8, 8, 1)}


class _Skips(nn.Module):
    """A U-Net with skips by concatenation, transposed convolutions and bilinear upsampling."""

    def __init__(self) -> None:
        super().__init__()

        def block(width: int, out: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(width, out, 3, padding=1), nn.GroupNorm(4, out), nn.SiLU(inplace=True),
                nn.Conv2d(out, out, 3, padding=1), nn.GroupNorm(4, out), nn.SiLU(inplace=True),
            )  # fmt: skip

        self.first, self.second, self.bottom = block(3, 8), block(8, 16), block(16, 32)
        self.raise_ = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.third, self.fourth = block(32, 16), block(24, 8)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = self.second(F.max_pool2d(a, 2))
        c = self.third(torch.cat([self.raise_(self.bottom(F.avg_pool2d(b, 2))), b], 1))
        up = F.interpolate(c, scale_factor=2, mode="bilinear", align_corners=False)
        return self.out(self.fourth(torch.cat([up, a], 1)))


def _dice(logits: Tensor, target: Tensor) -> Tensor:
    chosen = F.one_hot(target, 2).permute(0, 3, 1, 2).to(logits.dtype)
    shares = logits.softmax(1)
    both = (shares * chosen).sum((2, 3))
    dice = (2 * both + 1) / (shares.sum((2, 3)) + chosen.sum((2, 3)) + 1)
    return F.cross_entropy(logits, target) + 1 - dice.mean()


@named
def skips(batch: int) -> Example:
    """A U-Net under cross entropy and dice of each sample."""
    return Around(_Skips(), _dice), {"x": torch.randn(batch, 3, 16, 16), "target": torch.randint(2, (batch, 16, 16))}


@named
def mixture_density(batch: int) -> Example:
    """A mixture of Gaussians as output, its likelihood by logsumexp; the result is a dict."""

    class Mixture(nn.Module):
        def __init__(self, parts: int = 4) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh())
            self.share, self.mean, self.spread = (
                nn.Linear(64, parts),
                nn.Linear(64, 2 * parts),
                nn.Linear(64, 2 * parts),
            )

        def forward(self, *, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            h = self.body(x)
            share = self.share(h).log_softmax(-1)
            mean, spread = self.mean(h).view(len(x), -1, 2), F.softplus(self.spread(h)).view(len(x), -1, 2) + 1e-3
            likelihood = torch.distributions.Normal(mean, spread, validate_args=False).log_prob(y[:, None]).sum(-1)
            return {"loss": -torch.logsumexp(share + likelihood, -1).mean(), "mean": mean}

    return Mixture(), {"x": torch.randn(batch, WIDTH), "y": torch.randn(batch, 2)}


@named
def equation(batch: int) -> Example:
    """A physics-informed network: gradients of the output by the input inside the loss."""

    class Informed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

        def forward(self, point: Tensor) -> Tensor:
            _, moved = torch.func.jvp(self.body, (point,), (torch.ones_like(point),))
            return (moved - self.body(point)).square().mean()

    return Informed(), {"point": torch.rand(batch, 2)}


@named
def forces(batch: int) -> Example:
    """Energies of atoms from their distances, and forces as their derivatives, both with a target: two backwards."""

    class Potential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kinds = nn.Embedding(4, WIDTH)
            self.layers = nn.ModuleList(nn.Linear(WIDTH + 8, WIDTH) for _ in range(LAYERS))
            self.energy = nn.Linear(WIDTH, 1)

        def forward(self, places: Tensor, kinds: Tensor, energies: Tensor, forces: Tensor) -> Tensor:
            apart = (places[:, :, None] - places[:, None]).square().sum(-1)
            near = torch.exp(-apart[..., None] * torch.arange(1, 9))
            h = self.kinds(kinds)
            for layer in self.layers:
                h = h + torch.tanh(layer(torch.cat([h, near.sum(2)], -1)))
            found = self.energy(h).sum((1, 2))
            (slope,) = torch.autograd.grad(found.sum(), places, create_graph=True)
            return F.mse_loss(found, energies) + F.mse_loss(-slope, forces)

    places = torch.randn(batch, 6, 3, requires_grad=True)
    targets = {"energies": torch.randn(batch), "forces": torch.randn(batch, 6, 3)}
    return Potential(), {"places": places, "kinds": torch.randint(4, (batch, 6)), **targets}
