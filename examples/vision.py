"""A residual network with convolutions and BatchNorm on four CPU ranks, trained and then evaluated.

    torchrun --nproc-per-node 4 examples/vision.py

Batch statistics are those of the global batch, as on one device, however the plan splits the samples; the running
statistics that evaluation reads stay equal on all ranks. The loss is computed outside the model.
"""

import os

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import autopar

CLASSES = 8


class Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.skip = nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x):
        inner = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        return F.relu(inner + self.skip(x))


class ResNet(nn.Module):
    def __init__(self, width: int = 16):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2))
        self.head = nn.Linear(4 * width, CLASSES)

    def forward(self, images):
        features = self.blocks(F.relu(self.norm(self.stem(images))))
        return self.head(features.mean(dim=(2, 3)))


def data(samples: int):
    """Return noisy images whose class is the brightest of eight horizontal bands."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    images = 0.3 * torch.randn(samples, 3, 16, 16, generator=generator)
    images[torch.arange(16).unsqueeze(0).expand(samples, -1).div(2, rounding_mode="floor").eq(labels.unsqueeze(1))
           .unsqueeze(1).expand(-1, 3, -1)] += 1.0  # fmt: skip
    return images, labels


def main():
    torch.manual_seed(0)
    model = ResNet()
    images, labels = data(32)
    model = autopar.compile(model, f"cpu:{os.environ.get('WORLD_SIZE', '1')}", example_inputs=(images,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    speaks = os.environ.get("RANK", "0") == "0"
    for step in range(40):
        loss = F.cross_entropy(whole(model(images)), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if speaks:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
    model.eval()
    with torch.no_grad():
        correct = (whole(model(images)).argmax(dim=1) == labels).float().mean()
    if speaks:
        print(f"accuracy {correct.item():.3f}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def whole(logits):
    """Return an output as a plain tensor: what is larger than a scalar comes as a DTensor."""
    return logits.full_tensor() if hasattr(logits, "full_tensor") else logits


if __name__ == "__main__":
    main()
