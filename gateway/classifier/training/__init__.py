"""Training and evaluation of the classifier; the only place that needs scikit-learn."""
