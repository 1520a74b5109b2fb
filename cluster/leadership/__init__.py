"""Which of several controllers of one cluster supervises its workers; the others forward to it."""
