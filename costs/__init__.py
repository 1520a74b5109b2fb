"""What steps and transfers cost: models that workers fit while they run and that routers predict with, too."""
