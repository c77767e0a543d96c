"""Training Medusa heads by self-distillation: answers, hidden states of the frozen backbone, heads, evaluation."""
