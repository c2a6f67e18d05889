"""A small vision transformer for tests, as an ONNX file with several outputs."""

import io
import warnings
from functools import cache

import onnx
import torch
from torch import Tensor, nn

SIZE, PATCH, WIDTH = 32, 8, 16


class VisionTransformer(nn.Module):
    """Two blocks on a class token and sixteen patches of 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.class_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.places = nn.Parameter(torch.randn(1, 1 + (SIZE // PATCH) ** 2, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.pooler = nn.Linear(WIDTH, WIDTH)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens [batch, 17, 16] and the pooled class token [batch, 16]."""
        patches = self.patches(pixels).flatten(2).transpose(1, 2)
        first = self.class_token.expand(pixels.shape[0], -1, -1)
        tokens = torch.cat([first, patches], dim=1) + self.places
        for block in self.blocks:
            tokens = block(tokens)
        tokens = self.norm(tokens)
        return tokens, torch.tanh(self.pooler(tokens[:, 0]))


class Block(nn.Module):
    """Attention with two heads, then two layers, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH)
        self.joined = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the tokens after one block."""
        heads = self.queries_keys_values(self.before(tokens)).unflatten(2, (3, 2, WIDTH // 2))
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        weights = (queries @ keys.transpose(-1, -2) / (WIDTH // 2) ** 0.5).softmax(-1)
        tokens = tokens + self.joined((weights @ values).transpose(1, 2).flatten(2))
        changed: Tensor = tokens + self.layers(self.between(tokens))
        return changed


@cache
def make_transformer() -> VisionTransformer:
    """Return the same one on every call."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return VisionTransformer().eval()


@cache
def export_transformer(**metadata: str) -> bytes:
    """Return it as an ONNX file for RGB [batch, 3, 32, 32] that names both outputs."""
    buffer = io.BytesIO()
    batch = {0: "batch"}
    with warnings.catch_warnings():
        # The older exporter takes a tenth of the new one's time.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            make_transformer(),
            (torch.zeros(2, 3, SIZE, SIZE),),
            buffer,  # type: ignore[arg-type]
            input_names=["pixel_values"],
            output_names=["last_hidden_state", "pooler_output"],
            dynamic_axes=dict.fromkeys(
                ("pixel_values", "last_hidden_state", "pooler_output"), batch
            ),
            opset_version=17,
            dynamo=False,
        )
    if not metadata:
        return buffer.getvalue()
    model = onnx.load_model_from_string(buffer.getvalue())
    onnx.helper.set_model_props(model, metadata)
    content: bytes = model.SerializeToString()
    return content
