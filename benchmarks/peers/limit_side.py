"""The matrix products and optimizer passes of an update, without and with the other kernels of the model: two lower
bounds on its time."""

from products import Replay, kinds, square_rate
from protocol import Pipe


def main() -> None:
    pipe = Pipe()
    command = pipe.next(batch=0)
    path, replay = None, None
    while True:
        if command.get("products") != path:
            path = command["products"]
            replay, kind = Replay(path), kinds(path)
        rate = square_rate(kind)
        seconds = replay()
        phases = {"update": seconds["products"] + seconds["optimizer"], "ideal": replay.flops / rate}
        phases |= {"model": seconds["kernels"] + seconds["optimizer"], **seconds}
        command = pipe.next(phases=phases, square_gflops=rate / 1e9, flops=replay.flops)


if __name__ == "__main__":
    main()
