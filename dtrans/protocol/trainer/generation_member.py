"""A trainer's part in the recovery of a job from failures.

After each failure, a new *generation* of the job begins (`dtrans.protocol.generations`), and the
trainer connects to the servers again.
"""

from __future__ import annotations

from dtrans.errors import LostPeerError
from dtrans.protocol.generations import Generation, Generations, NewGeneration


class GenerationMember:
    """Participation of one trainer in one generation: the time between two failures of the job.

    Args:
      generations: interface to the launcher, which starts generations; None without a launcher that
        restarts processes.

    Attributes:
      generation: the servers' generation. None before a server has accepted this trainer, and if
        servers write no snapshots.
    """

    def __init__(self, generations: Generations | None) -> None:
        self.generation: Generation | None = None
        self._generations = generations

    @property
    def incarnation(self) -> int:
        """Number of the generation in which this process was started; 0 for the first process.

        A generation is the time between two failures. Servers use the number to refuse a process
        that was replaced.
        """
        return 0 if self._generations is None else self._generations.incarnation

    def enter(self, generation: Generation | None) -> None:
        """Take part in the generation of a server to which this trainer has connected.

        A generation is the time between two failures of the job. All servers must be in the same
        generation.

        Args:
          generation: the server's generation; None if the server writes no snapshots.

        Raises:
          NewGeneration: another server is in another generation.
        """
        if generation is None or self._generations is None:
            return
        if self.generation is not None and generation.number != self.generation.number:
            raise NewGeneration(max(generation.number, self.generation.number))
        if self.generation is None:
            self._generations.enter(generation)
        self.generation = generation

    def lost(self, e: LostPeerError) -> BaseException:
        """Tell the launcher that a server is lost; return the exception for the trainer to raise.

        In a job with snapshots, the trainer raises NewGeneration, and waits until the
        launcher has started the server again. In other jobs, it raises the error itself.

        Args:
          e: the error of the connection to the server.
        """
        if self._generations is None or self.generation is None:
            return e
        self._generations.report_lost(self.generation.number, e.role, str(e))
        return NewGeneration(self.generation.number + 1)

    def rejoin(self) -> GenerationMember:
        """Return a new object for the next generation, after a failure. The trainer then enters it.

        A generation is the time between two failures of the job.

        Raises:
          ReplacedError: the launcher has started another process of this trainer.
        """
        if self._generations is not None:
            self._generations.current()
        return GenerationMember(self._generations)

    def leave(self) -> None:
        """Tell the launcher that this trainer has finished all its steps.

        Such a trainer cannot go back to a snapshot after a later failure.
        """
        if self._generations is not None and self.generation is not None:
            self._generations.leave()
