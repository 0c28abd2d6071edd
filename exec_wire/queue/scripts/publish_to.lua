-- Appends one job to the stream of one worker.
-- KEYS: the stream.
-- ARGV: wire version, job id, gateway, packed job, seconds until an unread stream expires.
redis.call('XADD', KEYS[1], '*', 'v', ARGV[1], 'id', ARGV[2], 'to', ARGV[3], 'j', ARGV[4])
redis.call('EXPIRE', KEYS[1], ARGV[5])
