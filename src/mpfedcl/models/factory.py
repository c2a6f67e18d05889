"""Make the model of an experiment: on pixels, on features, or with a trainable encoder."""

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment.settings import ModelSettings
from mpfedcl.models.base import Model
from mpfedcl.models.cnn import Cnn
from mpfedcl.models.encoders.encoder import Encoder
from mpfedcl.models.encoders.torch_encoders import ResNetEncoder, TrainableEncoder
from mpfedcl.models.mlp import make_mlp


def make_model(
    encoder: Encoder | None,
    input_size: int,
    num_classes: int,
    settings: ModelSettings,
    *,
    trains_encoder: bool = False,
    takes_features: bool = False,
    image_shape: tuple[int, ...] | None = None,
) -> Model:
    """Return the model on pixels, on a frozen encoder's features, or with the encoder in it.

    Vectors that need no encoder are features too (`takes_features`). A CNN needs the shape of the
    images, [height, width] or [height, width, 3].
    """
    hidden = settings.hidden
    if settings.name == "cnn":
        if encoder is not None or takes_features or image_shape is None:
            raise InvalidInput(
                "model.name is 'cnn', which takes images as they are; for vectors, tables and an "
                "encoder's features it must be mlp."
            )
        return Cnn(image_shape, num_classes, hidden, has_norm=settings.norm == "group")
    if encoder is None or not trains_encoder:
        is_encoded = takes_features or encoder is not None
        return make_mlp(input_size, num_classes, hidden, is_encoded=is_encoded)
    if not isinstance(encoder, ResNetEncoder):
        raise InvalidInput(
            f"encoder.train is true, but the encoder {encoder.name} cannot be trained; "
            "encoder.name must be resnet18 or random-resnet18."
        )
    return TrainableEncoder(encoder.tensors, encoder.preprocessing, num_classes, hidden)
