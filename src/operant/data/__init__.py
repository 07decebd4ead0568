"""Tasks from files, lists, functions and the Hub, and the order in which they are attempted."""

from operant.data.order import Order
from operant.data.sources import FORMATS, HELD_OUT, read
from operant.data.tasks import DataOptions, load_tasks

__all__ = ["FORMATS", "HELD_OUT", "DataOptions", "Order", "load_tasks", "read"]
