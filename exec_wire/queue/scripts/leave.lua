-- Deregisters a worker, hands back all its entries, and wakes the workers that wait for jobs.
-- KEYS: its heartbeat, the set of workers, streams.
-- ARGV: group, consumer, idle time to set (ms), channel.
-- XGROUP DELCONSUMER loses the consumer's pending entries, so they move to the consumer `nobody` first.
local moved = false
redis.call('UNLINK', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[2])
for number = 3, #KEYS do
  local pending = redis.pcall('XPENDING', KEYS[number], ARGV[1], '-', '+', 100, ARGV[2])
  while not pending.err and #pending > 0 do
    for _, entry in ipairs(pending) do
      redis.call('XCLAIM', KEYS[number], ARGV[1], 'nobody', 0, entry[1], 'IDLE', ARGV[3], 'JUSTID')
    end
    moved = true
    pending = redis.call('XPENDING', KEYS[number], ARGV[1], '-', '+', 100, ARGV[2])
  end
  if not pending.err then redis.call('XGROUP', 'DELCONSUMER', KEYS[number], ARGV[1], ARGV[2]) end
end
if moved then redis.call('PUBLISH', ARGV[4], '') end
