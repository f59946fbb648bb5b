"""Around the steps: why tiles and fusion pay, other algorithms and schedules, and what they cost."""
