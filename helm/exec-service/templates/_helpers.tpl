{{/* Names and labels. Two releases in one namespace do not collide: every name begins with the release's. */}}
{{- define "exec.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels that never change: the selectors of Deployments are immutable. */}}
{{- define "exec.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "exec.labels" -}}
{{ include "exec.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* list context image */}}
{{- define "exec.image" -}}
{{- $ := index . 0 -}}
{{- $image := index . 1 -}}
{{- $name := $image.repository -}}
{{- with $.Values.image.registry -}}{{- $name = printf "%s/%s" . $name -}}{{- end -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $name $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name ($image.tag | default $.Values.image.tag | default $.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "exec.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* A map of settings as EXEC_* variables: text as it is, all else as JSON (so no number becomes 1.07e+09); null is omitted. */}}
{{- define "exec.settings" -}}
{{- range $name, $value := . }}
{{- if not (kindIs "invalid" $value) }}
EXEC_{{ upper $name }}: {{ ternary $value (toJson $value) (kindIs "string" $value) | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A server's URL as a variable; nothing if it is not set. Passwords come from Secrets only. list variable redis path */}}
{{- define "exec.urlEnv" -}}
{{- $redis := index . 1 -}}
{{- if $redis.existingSecret.name -}}
- name: {{ index . 0 }}
  valueFrom:
    secretKeyRef:
      name: {{ $redis.existingSecret.name }}
      key: {{ $redis.existingSecret.key }}
{{- else if $redis.url -}}
{{- if contains "@" $redis.url }}{{ fail (printf "%s.url: has a password in it; put the URL into a Secret and name that in %s.existingSecret.name" (index . 2) (index . 2)) }}{{ end -}}
- name: {{ index . 0 }}
  value: {{ $redis.url | quote }}
{{- end -}}
{{- end -}}

{{/* The URL of the job queue. */}}
{{- define "exec.redisEnv" -}}
{{- if or .Values.redis.existingSecret.name .Values.redis.url -}}
{{- include "exec.urlEnv" (list "EXEC_REDIS" .Values.redis "redis") -}}
{{- else if .Values.valkey.enabled -}}
{{- if .Values.valkey.existingSecret.name -}}
- name: VALKEY_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ .Values.valkey.existingSecret.name }}
      key: {{ .Values.valkey.existingSecret.key }}
{{ end -}}
- name: EXEC_REDIS
  value: {{ include "exec.valkeyUrls" . }}
{{- end -}}
{{- end -}}

{{/* The URL of the server of bulk jobs, if it is not that of the job queue. After exec.redisEnv. */}}
{{- define "exec.jobsRedisEnv" -}}
{{- $queue := .Values.redis -}}
{{- $jobs := .Values.jobs.redis | default (dict "existingSecret" dict "url" "") -}}
{{- if or $jobs.existingSecret.name $jobs.url -}}
{{- include "exec.urlEnv" (list "EXEC_JOBS_REDIS" $jobs "jobs.redis") -}}
{{- else if and (not $queue.existingSecret.name) (not $queue.url) (gt (int (.Values.valkey.shards | default 1)) 1) -}}
- name: EXEC_JOBS_REDIS
  value: {{ include "exec.valkeyUrls" . | splitList "," | first }}
{{- end -}}
{{- end -}}

{{/* The components of the chart's Valkey servers, separated by commas. */}}
{{- define "exec.valkeys" -}}
{{- range $number := untilStep 1 (int (add1 (.Values.valkey.shards | default 1))) 1 }}{{ eq $number 1 | ternary "valkey" (printf ",valkey-%d" $number) }}{{ end -}}
{{- end -}}

{{/* Their URLs, separated by commas. */}}
{{- define "exec.valkeyUrls" -}}
{{- $password := empty .Values.valkey.existingSecret.name | ternary "" ":$(VALKEY_PASSWORD)@" -}}
{{- $urls := list -}}
{{- range splitList "," (include "exec.valkeys" .) -}}
{{- $urls = append $urls (printf "redis://%s%s-%s:6379/0" $password (include "exec.fullname" $) .) -}}
{{- end -}}
{{- join "," $urls -}}
{{- end -}}

{{/* A worker pool's settings over those that all pools share. list context pool -> JSON */}}
{{- define "exec.pool" -}}
{{- $ := index . 0 -}}
{{- mergeOverwrite (deepCopy (omit $.Values.worker "pools")) (deepCopy (index . 1 | default dict)) | toJson -}}
{{- end -}}

{{/* Slots: three for every core of the runner, unless config.slots is set. */}}
{{- define "exec.slots" -}}
{{- if .config.slots -}}
{{- .config.slots -}}
{{- else -}}
{{- $cpu := toString .runner.resources.requests.cpu -}}
{{- if hasSuffix "m" $cpu -}}
{{- max 1 (div (mul 3 (trimSuffix "m" $cpu | int)) 1000) -}}
{{- else -}}
{{- max 1 (floor (mulf 3 ($cpu | float64)) | int) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The grace period before Kubernetes kills a pod: never less than the process needs to finish its calls.
     dict what part preStop longest */}}
{{- define "exec.grace" -}}
{{- $drain := .part.config.drain_s -}}
{{- if lt (float64 $drain) (float64 .longest) -}}
{{- fail (printf "%s: config.drain_s (%v) is below longestCallSeconds (%v): calls would be cut off by a rolling update" .what $drain .longest) -}}
{{- end -}}
{{- $least := add .preStop (ceil (float64 $drain)) 10 -}}
{{- $given := .part.terminationGracePeriodSeconds -}}
{{- if and $given (lt (int $given) (int $least)) -}}
{{- fail (printf "%s: terminationGracePeriodSeconds (%v) is below preStop + drain_s + 10 = %v" .what $given $least) -}}
{{- end -}}
{{- $given | default $least -}}
{{- end -}}

{{/* The security context of every container but the runner. */}}
{{- define "exec.plainSecurityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* The runner's security context, by worker.sandbox.profile; see docs/operations.md */}}
{{- define "exec.runnerSecurityContext" -}}
{{- $sandbox := .sandbox -}}
{{- if eq $sandbox.profile "unprivileged" -}}
{{ include "exec.plainSecurityContext" . }}
{{- else if eq $sandbox.profile "privileged" -}}
runAsUser: 0
runAsGroup: 10001
privileged: true
readOnlyRootFilesystem: true
{{- else -}}
runAsUser: 0
runAsGroup: 10001
allowPrivilegeEscalation: true # a consequence of SYS_ADMIN
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  add: {{ toJson $sandbox.capabilities }}
{{- if eq $sandbox.profile "userns" }}
procMount: Unmasked # a nested /proc can be mounted only where nothing of the outer one is hidden
seccompProfile:
  {{- toYaml $sandbox.seccompProfile | nindent 2 }}
{{- with $sandbox.appArmorProfile }}
appArmorProfile:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- else }}
seccompProfile:
  type: RuntimeDefault
{{- end }}
{{- end -}}
{{- end -}}

{{/* Refuses contradictions in a pool's values. list name pool */}}
{{- define "exec.checkPool" -}}
{{- $name := index . 0 -}}{{- $pool := index . 1 -}}
{{- $tier := $pool.config.min_tier -}}
{{- if and (eq $pool.sandbox.profile "unprivileged") (has $tier (list "A" "B")) -}}
{{- fail (printf "worker pool %s: without privileges the sandbox reaches tier C where nodes allow user namespaces, else D; set config.min_tier to it (now %s)" $name $tier) -}}
{{- end -}}
{{- if and (eq $pool.sandbox.profile "runtimeClass") (not $pool.runtimeClassName) -}}
{{- fail (printf "worker pool %s: sandbox.profile runtimeClass needs runtimeClassName (gvisor, kata-qemu, …)" $name) -}}
{{- end -}}
{{- if and (eq $tier "E") (not $pool.runtimeClassName) -}}
{{- fail (printf "worker pool %s: tier E is no isolation; it is accepted only where runtimeClassName puts a kernel of its own around the pod" $name) -}}
{{- end -}}
{{- end -}}

{{/* Replicas on many nodes and zones; each revision is spread by itself. dict root component extra */}}
{{- define "exec.spread" -}}
{{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
- maxSkew: 1
  topologyKey: {{ $key }}
  whenUnsatisfiable: ScheduleAnyway
  matchLabelKeys: [pod-template-hash]
  labelSelector:
    matchLabels:
      {{- include "exec.selector" $.root | nindent 6 }}
      app.kubernetes.io/component: {{ $.component }}
      {{- with $.pool }}
      exec-service/pool: {{ . }}
      {{- end }}
{{- end }}
{{- end -}}

{{- define "exec.dns" -}}
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end -}}

{{/* Egress to the job queue. */}}
{{- define "exec.redisEgress" -}}
{{- if or .Values.redis.url .Values.redis.existingSecret.name -}}
- to:
    {{- toYaml .Values.networkPolicy.redis | nindent 4 }}
  ports:
    - {port: {{ .Values.redis.port }}, protocol: TCP}
{{- else -}}
- to:
    - podSelector:
        matchLabels:
          {{- include "exec.selector" . | nindent 10 }}
        matchExpressions:
          - {key: app.kubernetes.io/component, operator: In, values: [{{ include "exec.valkeys" . }}]}
  ports:
    - {port: 6379, protocol: TCP}
{{- end -}}
{{- end -}}

{{/* The 90th percentile of the wait in the gateways, where calls wait; 0 without calls. */}}
{{- define "exec.queueWaitQuery" -}}
{{- $jobs := printf "namespace=\"%s\",job=\"%s-gateway\"" .Release.Namespace (include "exec.fullname" .) -}}
{{- .Values.worker.autoscaling.query | default (printf "(histogram_quantile(0.9, sum by (le) (rate(exec_stage_seconds_bucket{stage=\"queue\",%s}[1m]))) > 0) or vector(0)" $jobs) -}}
{{- end -}}

{{/* Where gateways and jobs workers mount the volume of bulk jobs; the first process creates the folder in it, for its owner only. */}}
{{- define "exec.jobsVolume" -}}
/var/lib/exec-service
{{- end -}}

{{- define "exec.jobsDir" -}}
{{ include "exec.jobsVolume" . }}/jobs
{{- end -}}

{{- define "exec.jobsClaim" -}}
{{- .Values.jobs.folder.existingClaim | default (printf "%s-jobs" (include "exec.fullname" .)) -}}
{{- end -}}
