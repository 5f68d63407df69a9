"""The strategies beside those that matter most, and larger models, beside PyTorch."""
from ..outcome import Skipped
from . import speed

CHECKS = "as speed, for more strategies, longer sequences and larger models, as far as time goes"
SECONDS = 100


def run(place, found):
    if not place.is_cuda:
        raise Skipped("these models are for a GPU")
    speed.measure(place, found, speed.MORE_ON_CUDA, are_essential=False)
