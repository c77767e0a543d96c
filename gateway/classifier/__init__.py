"""The prompt classifier: what form of answer a prompt asks for (code, chat, creative, or an operator's own labels)."""

from gateway.classifier.model import ArtifactError, Classification, PromptClassifier

__all__ = ["ArtifactError", "Classification", "PromptClassifier"]
