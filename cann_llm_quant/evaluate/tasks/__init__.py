"""Multiple-choice and completion tasks: what each asks, where its questions lie, and how they are read."""

from cann_llm_quant.evaluate.tasks.items import Item
from cann_llm_quant.evaluate.tasks.load import TaskData, load_task
from cann_llm_quant.evaluate.tasks.table import TASKS, Task, find_tasks

__all__ = ["TASKS", "Item", "Task", "TaskData", "find_tasks", "load_task"]
