"""PPO with a natural gradient (Kakade, 2001): steps go along (F + damping I)^-1 g, and not along the gradient g.

F is the Fisher matrix of a minibatch's tokens. Conjugate gradients solve for the direction, starting from the last one.
For one process, and minibatches that fit into one forward pass.
"""

from dataclasses import dataclass, replace

import torch
from torch.autograd import grad

from operant.algorithms import find
from operant.training.update import GradientUpdate, RateOptions, UpdateOptions


@dataclass(frozen=True)
class NaturalOptions(UpdateOptions):
    damping: float = 0.1
    solver_steps: int = 10


class NaturalGradient(GradientUpdate):
    update_options, optimizer_options = NaturalOptions, RateOptions

    def make_optimizer(self):
        self.state = {"direction": vector(torch.zeros_like(p) for p in self.policy.trainable())}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state

    def step(self, minibatch, sampling, *, lr, shrink):
        weights, options = self.policy.trainable(), self.options["update"]
        with self.policy.double_backward():
            logprobs = self.policy(minibatch, sampling).logprobs[minibatch.actions]
        slopes = torch.zeros_like(logprobs, requires_grad=True)
        across = vector(grad(logprobs, weights, slopes, create_graph=True, materialize_grads=True))

        def fisher(v):  # J'J v / N + damping v, where a row of J is the gradient of a token's log-prob
            (along,) = grad(across, slopes, v, retain_graph=True)
            back = grad(logprobs, weights, along / len(along), retain_graph=True, materialize_grads=True)
            return vector(back) + options.damping * v

        x, gradient = self.state["direction"], vector(p.grad for p in weights)
        residual = towards = shrink * gradient - fisher(x)
        for _ in range(options.solver_steps):
            if (before := residual.dot(residual)) <= 1e-12 * gradient.dot(gradient):
                break  # solved as far as float32 can tell; further steps would follow the rounding
            image = fisher(towards)
            x, residual = x + before / towards.dot(image) * towards, residual - before / towards.dot(image) * image
            towards = residual + residual.dot(residual) / before * towards
        self.state["direction"] = x
        for p, change in zip(weights, x.split([p.numel() for p in weights]), strict=True):
            p.data.sub_(lr * change.view_as(p))


vector = torch.nn.utils.parameters_to_vector
ALGORITHM = replace(find("ppo"), update=NaturalGradient)
